"""Kernels started again, without what Triton does in Python at every start.

``kernel[grid](...)`` finds out what its arguments are, writes it down as a string, and asks its hooks: 10 to 16
microseconds of a fast CPU's time. Here a compiled kernel is remembered by all that Triton compiles it for: kernel,
device, names, types and values of the compile-time arguments and options, and of each other argument

* a tensor: its dtype, and its address modulo 16;
* an integer: whether it is 1, and whether it is a multiple of 16;
* anything else (float, bool, None): its type.

What was never seen goes Triton's way, and so do tensors of a CPU, integers of 64 bits, versions of Triton whose
compiled kernels are not known to be started like this, and everything while a hook (Triton's profiler) wants to hear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import triton
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver

KNOWN = ("3.6.", "3.7.")
"""Versions of Triton in which ``JITFunction.run`` starts a compiled kernel as ``Starts.again`` does."""
DIRECT = triton.__version__.startswith("3.6.")
"""Whether a compiled kernel's launcher, of its C part, takes its arguments in a row."""
HERE = "is_cuda"
"""What a tensor is that kernels may be started with."""
WIDEST = 1 << 31
PLAIN = (float, bool, NoneType)
Reader = Callable[..., tuple[tuple[Any, ...] | None, tuple[Any, ...]]]


@dataclass(frozen=True, slots=True)
class Site:
    """Starts of one kernel with arguments of the same types."""

    kernel: Any
    """Kept, so that no other kernel gets its id."""
    read: Reader
    starts: dict[tuple[Any, ...], tuple[Any, ...]] = field(default_factory=dict)
    """By what ``read`` finds: what runs the compiled kernel, and its arguments between the stream and the kernel's."""


def reader(parameters: Sequence[str], types: Sequence[type], options: Sequence[str]) -> Reader | None:
    """A function of arguments of these ``types`` and then of the values of ``options``: what a kernel with these
    ``parameters`` is compiled for (None: that is not to be remembered), and a value for each parameter, for a tensor
    its address. None: arguments of some other kind are among them.

    It is written out and compiled: a loop over the arguments takes twice as long.
    """
    own = list(parameters[: len(types)])
    of = dict(zip(own, types, strict=True))
    tensors = [n for n in own if of[n] is Tensor]
    ints = [n for n in own if of[n] is int]
    if not tensors or any(kind not in (Tensor, int, *PLAIN) for kind in types):
        return None
    at = {n: f"at_{n}" for n in tensors}
    fits = [f"{n}.{HERE}" for n in tensors] + [f"{-WIDEST} <= {n} < {WIDEST}" for n in ints]
    key = [f"{n}.dtype" for n in tensors] + [f"({n} == 1) - (not {n} & 15)" for n in ints] + list(options)
    # Mostly all addresses are multiples of 16.
    key.append(f"({' | '.join(at.values())}) & 15 and ({', '.join(f'{p} & 15' for p in at.values())},)")
    # The launcher takes a value for every parameter, and leaves out those it was compiled with.
    values = [at.get(n, n) for n in own] + [n if n in options else "None" for n in parameters[len(own) :]]
    lines = [
        f"def read({', '.join([*own, *options])}):",
        *(f"    {p} = {n}.data_ptr()" for n, p in at.items()),
        f"    values = ({', '.join(values)},)",
        f"    return (({', '.join(key)},) if {' and '.join(fits)} else None), values",
    ]
    made: dict[str, Any] = {}
    exec("\n".join(lines), made)
    read: Reader = made["read"]
    return read


class Starts:
    """Compiled kernels by what they were compiled for."""

    def __init__(self) -> None:
        self._sites: dict[tuple[Any, ...], Site | None] = {}

    def again(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Start ``kernel`` if it is known for such arguments; whether it was started."""
        given = (*args, *options.values())
        device = driver.active.get_current_device()
        site = self._sites.get((id(kernel), device, *map(type, given), *options))
        if site is None:
            return False
        key, values = site.read(*given)
        start = site.starts.get(key)
        hooks = knobs.runtime
        if start is None or hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            return False
        run, before = start
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        run(x, y, z, driver.active.get_current_stream(device), *before, *values)
        return True

    def remember(self, kernel: Any, args: tuple[Any, ...], options: dict[str, Any], compiled: Any) -> None:
        """``compiled`` is what ``kernel`` is for such arguments."""
        given = (*args, *options.values())
        place = (id(kernel), driver.active.get_current_device(), *map(type, given), *options)
        if place not in self._sites:
            read = reader(kernel.arg_names, [type(a) for a in args], list(options))
            self._sites[place] = None if read is None else Site(kernel, read)
        site = self._sites[place]
        if site is None:
            return
        key, _ = site.read(*given)
        if key is not None:
            site.starts[key] = _start_of(compiled)


def _start_of(compiled: Any) -> tuple[Any, ...]:
    """What ``Site.starts`` has for it; nobody hears of the start."""
    run, unheard = compiled.run, (None, None, None)
    if DIRECT and not run.global_scratch_size and not run.profile_scratch_size:
        about = (run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata)
        return run.launch, (compiled.function, *about, *unheard)
    return run, (compiled.function, compiled.packed_metadata, *unheard)


def starts_if_known() -> Starts | None:
    """None: this version of Triton starts its kernels itself."""
    return Starts() if triton.__version__.startswith(KNOWN) else None
