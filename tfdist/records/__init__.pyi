from tfdist.records.clients import open_clients as open_clients
from tfdist.records.faults import check as check
from tfdist.records.manifest import load_manifest as load_manifest
from tfdist.records.reader import explain_read_error as explain_read_error
from tfdist.records.reader import open_records as open_records
from tfdist.records.reader import read as read
from tfdist.records.writer import write as write
