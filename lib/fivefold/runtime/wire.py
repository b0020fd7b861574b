"""Plain data and tensors to bytes and back, in a format that cannot execute code.

What a rank returns crosses a process boundary. Pickle would let a rank run anything in the process that reads it, so
the structure travels as JSON and the tensors as safetensors.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import struct
from typing import Any

import safetensors.torch
import torch

PLAIN = (
    "None, bool, int, float, complex, str, bytes, list, tuple, dict with string, int or tuple keys, dataclass, tensor"
)


def encode(value: Any) -> bytes:
    """Value to bytes. Dataclasses become dicts, sets become sorted lists, tensors are detached and moved to the CPU.

    Raises TypeError that names the place and the type of what is neither plain data nor a tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    structure = json.dumps(_pack(value, "result", tensors)).encode()
    return struct.pack(">Q", len(structure)) + structure + safetensors.torch.save(tensors)


def decode(data: bytes) -> Any:
    """Bytes to value; raises ValueError when they are not what `encode` writes."""
    try:
        (length,) = struct.unpack_from(">Q", data)
        structure = json.loads(data[8 : 8 + length])
        tensors = safetensors.torch.load(data[8 + length :])
        return _unpack(structure, tensors)
    except Exception as error:
        raise ValueError(f"these bytes are not a result: {error}") from None


def _pack(value: Any, place: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return {"tensor": _add(value, tensors)}
    if value is None or type(value) in (bool, str):
        return value
    if isinstance(value, bool | int):
        return {"int": str(int(value))}
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes | bytearray):
        return {"bytes": base64.b85encode(bytes(value)).decode()}
    if isinstance(value, torch.dtype | torch.device | torch.Size):
        return _pack(tuple(value) if isinstance(value, torch.Size) else str(value), place, tensors)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return _pack(fields, place, tensors)
    if isinstance(value, dict):
        items = value.items()
        return {"dict": [[_pack(k, f"{place} key", tensors), _pack(v, f"{place}[{k!r}]", tensors)] for k, v in items]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_pack(item, f"{place}[{i}]", tensors) for i, item in enumerate(value)]}
    if isinstance(value, set | frozenset):
        return _pack(sorted(value), place, tensors)
    raise TypeError(f"{place} is a {type(value).__module__}.{type(value).__qualname__}: a rank can return only {PLAIN}")


def _add(tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> str:
    name = str(len(tensors))
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    tensors[name] = local.detach().as_subclass(torch.Tensor).to("cpu", copy=True).contiguous()
    return name


def _unpack(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "int":
        return int(content)
    if kind == "float":
        return float.fromhex(content)
    if kind == "complex":
        return complex(*map(float.fromhex, content))
    if kind == "bytes":
        return base64.b85decode(content)
    if kind == "dict":
        return {_unpack(k, tensors): _unpack(v, tensors) for k, v in content}
    items = [_unpack(item, tensors) for item in content]
    return items if kind == "list" else tuple(items)
