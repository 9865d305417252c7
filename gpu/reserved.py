"""A KV cache whose addresses exist before its memory does, through CUDA's virtual memory calls.

Graphs hold the addresses of the cache, and how large it can be is known only once all graphs are
captured. So the addresses of the largest cache are reserved, graphs are captured with a page or two
behind them, and the rest of the memory is put there afterwards: programs are built once.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..shared.errors import InternalError
from .graphs import alias_of

DEVICE = 1
"""CU_MEM_LOCATION_TYPE_DEVICE, and CU_MEM_ALLOCATION_TYPE_PINNED, which has the same value."""
READ_WRITE = 3
"""CU_MEM_ACCESS_FLAGS_PROT_READWRITE"""
OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY"""


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
    if status == OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(f"{name}: the device has too little memory left")
    if status:
        raise InternalError(f"{name} failed with CUDA driver error {status}")


def _size(value: int) -> ctypes.c_size_t:
    return ctypes.c_size_t(value)


class Work(Protocol):
    """What may run on the memory: a stream, or what owns one."""

    def synchronize(self) -> None:
        """Wait until it is done."""
        ...


@dataclass(slots=True)
class _Held:
    """What the driver has to get back, and the work that must end before."""

    base: int = 0
    size: int = 0
    handles: list[ctypes.c_ulonglong] = field(default_factory=list)
    mappings: list[tuple[int, int]] = field(default_factory=list)
    """(address, bytes)"""
    work: list[Work] = field(default_factory=list)


def _give_back(held: _Held) -> list[Exception]:
    """Give all of it back. What fails is returned, not raised: a finalizer must not raise, and
    the rest is tried.
    """
    failures: list[Exception] = []

    def attempt(call: Callable[..., Any], *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:
            failures.append(error)

    # To unmap does not wait for programs that still run. Streams are waited for, not the device:
    # another engine of this process may be capturing, and waiting for the device would spoil its
    # capture.
    for work in held.work:
        attempt(work.synchronize)
    held.work.clear()
    for address, size in held.mappings:
        attempt(_call, "cuMemUnmap", ctypes.c_ulonglong(address), _size(size))
    for handle in held.handles:
        attempt(_call, "cuMemRelease", handle)
    if held.base:
        attempt(_call, "cuMemAddressFree", ctypes.c_ulonglong(held.base), _size(held.size))
    return failures


class _AddressRange:
    """Reserved addresses and the memory mapped there: given back by `free`, or once nobody holds
    this any more.
    """

    def __init__(self, size: int, device: int) -> None:
        location = _Location(DEVICE, device)
        self._properties = _Properties(type=DEVICE, location=location)
        self._access = _Access(location, READ_WRITE)
        self._held = _Held(size=size, work=[torch.cuda.default_stream(device)])
        self._finalizer = weakref.finalize(self, _give_back, self._held)
        self._finalizer.atexit = False  # the driver takes everything back when the process ends
        base = ctypes.c_ulonglong()
        zero = ctypes.c_ulonglong(0)
        _call("cuMemAddressReserve", ctypes.byref(base), _size(size), _size(0), zero, zero)
        self.base = self._held.base = base.value

    def create(self, size: int) -> ctypes.c_ulonglong:
        """Memory that has no address yet."""
        handle = ctypes.c_ulonglong()
        _call(
            "cuMemCreate",
            ctypes.byref(handle),
            _size(size),
            ctypes.byref(self._properties),
            ctypes.c_ulonglong(0),
        )
        self._held.handles.append(handle)
        return handle

    def map(self, address: int, size: int, handle: ctypes.c_ulonglong) -> None:
        """Put memory behind an address; the same memory may be put behind several."""
        place = ctypes.c_ulonglong(address)
        _call("cuMemMap", place, _size(size), _size(0), handle, ctypes.c_ulonglong(0))
        self._held.mappings.append((address, size))
        _call("cuMemSetAccess", place, _size(size), ctypes.byref(self._access), _size(1))

    def wait_for(self, work: Work) -> None:
        """Wait for this too before anything is given back."""
        self._held.work.append(work)

    def free(self) -> None:
        """Give memory and addresses back, once. Raises InternalError."""
        failures = self._finalizer()
        if failures:
            raise InternalError(f"the KV cache was not freed: {failures[0]}") from failures[0]


def _granule(device: int) -> int:
    """Bytes of which every mapping is a multiple."""
    granule = ctypes.c_size_t()
    properties = _Properties(type=DEVICE, location=_Location(DEVICE, device))
    _call("cuMemGetAllocationGranularity", ctypes.byref(granule), ctypes.byref(properties), 0)
    return granule.value


class ReservedCache:
    """One tensor [page ...] a layer over reserved addresses; only pages that `back` was called for
    have memory.

    A tensor has more pages than the `max_pages` that can be backed: the last slot of the last page
    takes the rows of padding (see `ops/reference/paged.py`) at any time. It lies in memory that all
    layers share, as nobody reads it.

    `free` gives everything back. Else that happens once neither this nor one of the tensors is held
    any more.
    """

    def __init__(
        self, layers: int, max_pages: int, page: tuple[int, ...], dtype: torch.dtype, device: int
    ) -> None:
        """`page`: the shape of one page of one layer."""
        torch.cuda.synchronize(device)  # the driver's calls below need the device's context
        self.granule = _granule(device)
        self.max_pages = max_pages
        self._device = device
        self._layers = layers
        self._page_bytes = math.prod(page) * dtype.itemsize
        self._mapped = 0
        """Bytes of each layer that exist."""
        # Scratch begins with a granule of its own, so that its mapping never meets those of pages.
        self._scratch = self._rounded(max_pages * self._page_bytes)
        pages = math.ceil(self._scratch / self._page_bytes) + 1
        self._each = self._rounded(pages * self._page_bytes)
        self._range = _AddressRange(self._each * layers, device)
        starts = [self._range.base + layer * self._each for layer in range(layers)]
        size = self._each - self._scratch
        scratch = self._range.create(size)
        for start in starts:
            self._range.map(start + self._scratch, size, scratch)
        # torch asks which device an address belongs to: only one with memory behind it has an
        # answer
        self.back(1)
        # The tensors hold the range, which must not hold this: the collector sees no way through a
        # tensor.
        self.layers = tuple(
            alias_of(start, (pages, *page), dtype, device, self._range) for start in starts
        )

    @property
    def bytes(self) -> int:
        """Memory behind the pages."""
        return self._mapped * self._layers

    def _rounded(self, size: int) -> int:
        return -(-size // self.granule) * self.granule

    def back(self, pages: int) -> None:
        """Put zeroed memory behind the first `pages` pages of each layer; keeps what is there."""
        if pages > self.max_pages:
            raise InternalError(f"the cache was reserved for {self.max_pages} pages, got {pages}")
        size = self._rounded(pages * self._page_bytes) - self._mapped
        if size <= 0:
            return
        for layer in range(self._layers):
            address = self._range.base + layer * self._each + self._mapped
            self._range.map(address, size, self._range.create(size))
            alias_of(address, (size,), torch.uint8, self._device).zero_()
        self._mapped += size

    def wait_for(self, work: Work) -> None:
        """Programs run there too, beside the default stream: hold it, and wait for it before
        memory is given back.
        """
        self._range.wait_for(work)

    def free(self) -> None:
        """Give memory and addresses back, once. No program may run on the tensors any more."""
        self._mapped = 0
        self._range.free()
