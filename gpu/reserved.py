"""A KV cache whose addresses exist before its memory does, through CUDA's virtual memory calls.

Graphs hold the addresses of the cache, and how large it can be is known only once all graphs are captured. So the
addresses of the largest cache are reserved, graphs are captured with a page or two behind them, and the rest of the
memory is put there afterwards: programs are built once.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch

from ..shared.errors import InternalError
from .graphs import alias_of

DEVICE = 1
"""CU_MEM_LOCATION_TYPE_DEVICE, and CU_MEM_ALLOCATION_TYPE_PINNED, which has the same value."""
READ_WRITE = 3
"""CU_MEM_ACCESS_FLAGS_PROT_READWRITE"""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


def _call(name: str, *args: Any) -> None:
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*args)
    if status:
        raise InternalError(f"{name} failed with CUDA driver error {status}")


def _size(value: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(value)


class ReservedCache:
    """One tensor [max_pages + 1, ...] a layer over reserved addresses; only pages that `back` was called for exist."""

    def __init__(self, layers: int, max_pages: int, page: tuple[int, ...], dtype: torch.dtype, device: int) -> None:
        """`page`: the shape of one page of one layer."""
        torch.cuda.synchronize(device)  # the driver's calls below need the device's context
        location = _Location(DEVICE, device)
        self._properties = _Properties(type=DEVICE, location=location)
        self._access = _Access(location, READ_WRITE)
        granule = ctypes.c_size_t()
        _call("cuMemGetAllocationGranularity", ctypes.byref(granule), ctypes.byref(self._properties), 0)
        self.granule = granule.value
        self._page_bytes = math.prod(page) * dtype.itemsize
        self._each = self._rounded((max_pages + 1) * self._page_bytes)
        self._layers = layers
        self.max_pages = max_pages
        self._mapped = 0
        """Bytes of each layer that exist."""
        self._handles: list[ctypes.c_ulonglong] = []
        self._pieces: list[tuple[int, int]] = []
        base = ctypes.c_ulonglong()
        _call("cuMemAddressReserve", ctypes.byref(base), _size(self._each * layers), _size(0), ctypes.c_ulonglong(0),
              ctypes.c_ulonglong(0))  # fmt: skip
        self._base = base.value
        self.back(1)  # torch asks which device an address belongs to: only one with memory behind it has an answer
        places = (self._base + layer * self._each for layer in range(layers))
        self.layers = tuple(alias_of(place, (max_pages + 1, *page), dtype, device) for place in places)

    @property
    def bytes(self) -> int:
        """Memory behind the addresses."""
        return self._mapped * self._layers

    def _rounded(self, size: int) -> int:
        return -(-size // self.granule) * self.granule

    def back(self, pages: int) -> None:
        """Put zeroed memory behind the first `pages` pages and the scratch page of each layer; keeps what is there."""
        wanted = self._rounded((pages + 1) * self._page_bytes)
        if wanted > self._each:
            raise InternalError(f"the cache was reserved for {self.max_pages} pages, got {pages}")
        grown = wanted - self._mapped
        if grown <= 0:
            return
        for layer in range(self._layers):
            address = self._base + layer * self._each + self._mapped
            handle = ctypes.c_ulonglong()
            _call("cuMemCreate", ctypes.byref(handle), _size(grown), ctypes.byref(self._properties),
                  ctypes.c_ulonglong(0))  # fmt: skip
            self._handles.append(handle)
            _call("cuMemMap", ctypes.c_ulonglong(address), _size(grown), _size(0), handle, ctypes.c_ulonglong(0))
            self._pieces.append((address, grown))
            _call("cuMemSetAccess", ctypes.c_ulonglong(address), _size(grown), ctypes.byref(self._access), _size(1))
            alias_of(address, (grown,), torch.uint8, self._properties.location.id).zero_()
        self._mapped = wanted

    def free(self) -> None:
        """Give memory and addresses back. No program may run on the tensors any more."""
        torch.cuda.synchronize(self._properties.location.id)
        for address, size in self._pieces:
            _call("cuMemUnmap", ctypes.c_ulonglong(address), _size(size))
        for handle in self._handles:
            _call("cuMemRelease", handle)
        _call("cuMemAddressFree", ctypes.c_ulonglong(self._base), _size(self._each * self._layers))
        self._pieces, self._handles, self._mapped = [], [], 0
