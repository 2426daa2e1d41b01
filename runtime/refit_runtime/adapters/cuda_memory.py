"""Arenas in device memory, copies and digests at its speed.

- An arena is one allocation of the driver's own (O11): not of torch's caching allocator, whose segments may be made of pieces that are mapped later, which
  a transport cannot register as one region. It is given back when the last tensor over it is gone.
- A list of copies is one kernel launch for each form of tile (`cuda_tiles`): nearly always one. Running it allocates and compiles nothing, whatever
  strides and casts are in it; casts that torch knows and the kernel does not are left to torch. Tried as one CUDA graph of torch's copies, the same
  1,093 copies of 16 GB took 12.5 ms to install on an H200 where this takes 7.9 and a plain copy 7.5: torch moves columns of a matrix two bytes at a time.
- Copies run on the caller's stream: they come after what it has issued. Digests have a stream of their own beside an engine at work.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Sequence

import torch
import triton.language as tl
from refit_api.errors import SpecError

from refit_runtime.adapters.cuda_kernels import COPY_WARPS, DIGEST_WARPS, LANES, SLICE, copy_tiles, digest_blocks
from refit_runtime.adapters.cuda_tiles import End, Form, tables
from refit_runtime.digest import Digests, block_count

CASTS = (torch.float32, torch.float16, torch.bfloat16)
ALIGNMENT = 16  # of what is digested: a run starts at a multiple of 256 bytes, a chunk at one of a block

Pair = tuple[torch.Tensor, torch.Tensor]


class CudaMemory:
    """The `Memory` of ranks whose weights are on CUDA devices."""

    def __init__(self) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._lock = threading.Lock()

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        with torch.cuda.device(device):
            free, total = torch.cuda.mem_get_info()
            if size > free:
                torch.cuda.empty_cache()  # what the framework keeps without using it
                free, total = torch.cuda.mem_get_info()
            address = ctypes.c_uint64()
            if size > free or self._driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)) != 0:
                raise SpecError(
                    f"the arena needs {size} bytes on {device} and {free} of {total} are free: give the framework less of the device "
                    "(vLLM: --gpu-memory-utilization), use fewer arenas, or more devices",
                    needed=size,
                    free=free,
                )
            block = _Block(address.value, size)
            weakref.finalize(block, self._free, address.value, device).atexit = False
            return torch.as_tensor(block, device=device)

    def _free(self, address: int, device: torch.device) -> None:
        with torch.cuda.device(device):
            self._driver.cuMemFree_v2(ctypes.c_uint64(address))

    def copies(self, pairs: Sequence[Pair]) -> CudaCopies:
        return CudaCopies(pairs)

    def digests(self, data: torch.Tensor, digests: Digests) -> bytes:
        data = data if data.data_ptr() % ALIGNMENT == 0 else data.clone()
        device = data.get_device()
        with torch.cuda.device(device):
            beside = self._stream(device)
            beside.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(beside):
                sums = torch.zeros(2 * block_count(data.numel()), dtype=torch.int64, device=data.device)
                grid = (max(1, -(-data.numel() // (8 * SLICE))),)
                digest_blocks[grid](data, sums, data.numel(), *digests.keys, slice_=SLICE, lanes=LANES, num_warps=DIGEST_WARPS)
                return sums.cpu().numpy().tobytes()

    def _stream(self, device: int) -> torch.cuda.Stream:
        with self._lock:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            return self._streams[device]


class _Block:
    """Memory that torch takes over without a copy; it keeps this object as long as a tensor needs the memory."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


class CudaCopies:
    """The addresses are fixed, so the tensors are kept."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = tuple(pairs)
        self._others = [(to, source) for to, source in pairs if not _tiled(to, source)]
        self._device = pairs[0][0].get_device()
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        found = tables((tuple(to.shape), _end(to), _end(source)) for to, source in pairs if _tiled(to, source))
        self._launches = [(form, torch.from_numpy(table).to(pairs[0][0].device)) for form, table in found.items()]
        with torch.cuda.device(self._device):
            for form, table in self._launches:
                _launch(form, torch.zeros_like(table[:1]))  # a tile without rows: compiled and loaded now

    def start(self) -> None:
        with torch.cuda.device(self._device):
            with torch.no_grad():
                for to, source in self._others:
                    to.copy_(source)
            for form, table in self._launches:
                _launch(form, table)
            self._done.record()

    def wait(self) -> None:
        self._done.synchronize()


def _tiled(to: torch.Tensor, source: torch.Tensor) -> bool:
    assert to.shape == source.shape, f"a copy from {tuple(source.shape)} to {tuple(to.shape)}"
    return to.device == source.device and (to.dtype == source.dtype or (to.dtype in CASTS and source.dtype in CASTS))


def _end(tensor: torch.Tensor) -> End:
    return End(tensor.data_ptr(), tensor.stride(), str(tensor.dtype).removeprefix("torch."), tensor.element_size())


def _launch(form: Form, table: torch.Tensor) -> None:
    copy_tiles[(len(table),)](
        table,
        fields=form.fields,
        to_type=getattr(tl, form.target),
        from_type=getattr(tl, form.source),
        vector=form.vector,
        tile_rows=form.rows,
        tile_columns=form.columns,
        strided=form.strided,
        num_warps=COPY_WARPS,
    )
