"""Classes of protobuf messages that no package brings, with the few fields that are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def message_classes(package: str, messages: Mapping[str, str]) -> dict[str, Any]:
    """Returns the class of each message, by name.

    Args:
        messages: name -> fields, such as "int64 id 1, repeated Event events 4". Of those that begin
            with "oneof" a message has one at a time, of which ``WhichOneof("value")`` tells.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{package}.proto", package=package, syntax="proto3"
    )
    for message, listed in messages.items():
        made = file.message_type.add(name=message)
        for text in listed.split(", "):
            *how, kind, name, number = text.split()
            label = kinds.LABEL_REPEATED if how == ["repeated"] else kinds.LABEL_OPTIONAL
            added = made.field.add(name=name, number=int(number), label=label)
            if kind.islower():
                added.type = getattr(kinds, f"TYPE_{kind.upper()}")
            else:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".{package}.{kind}"
            if how == ["oneof"]:
                added.oneof_index = 0
        if "oneof " in listed:
            made.oneof_decl.add(name="value")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
        for name in messages
    }
