from tfdist.records.adopting.adopt import adopt as adopt
from tfdist.records.clients.collection import open_clients as open_clients
from tfdist.records.format.checking import check as check
from tfdist.records.format.manifest import load_manifest as load_manifest
from tfdist.records.reading.reader import explain_read_error as explain_read_error
from tfdist.records.reading.reader import open_records as open_records
from tfdist.records.reading.reader import read as read
from tfdist.records.writing.writer import write as write
