"""Compile methods for their objects."""

import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ppo_lightning.errors import ConfigError, first_line
from ppo_lightning.private import (
    COMPILER_ERRORS,
    STORE_SCAN,
    CompileContext,
    FailOnRecompileLimitHit,
    mark_static_address,
    scan_in_graph,
    tree_leaves,
    tree_map,
)
from ppo_lightning.utils.watch import Interrupted, end_request


def compile_per_instance(method: Callable[..., Any], fullgraph: bool = True, options: Any = None) -> Any:
    """Compile a method for its object alone.

    PyTorch caches graphs per function code. Objects of one class would share the cache although their methods
    depend on the object, and PyTorch stops compiling after eight graphs (eight runs in a notebook). A copy of
    the code gives each object a cache of its own. The options are those of ``torch.compile``.
    """
    function = method.__func__  # type: ignore[attr-defined]
    code = function.__code__.replace()
    attributes = (function.__name__, function.__defaults__, function.__closure__)
    copy = types.FunctionType(code, function.__globals__, *attributes)
    bound = types.MethodType(copy, method.__self__)  # type: ignore[attr-defined]
    # Shapes do not vary within a run. PyTorch remembers those of other runs in the process, and would compile
    # for all sizes of images, which fails for IMPALA.
    dynamic = False if fullgraph else None
    compiled = torch.compile(bound, fullgraph=fullgraph, dynamic=dynamic, options=options)

    def call(*args: Any) -> Any:
        try:
            if end_request.number:  # no graph is worth its compilation any more
                return torch.compiler.set_stance("eager_on_recompile")(compiled)(*args)
            with end_request.may_cut(CompileContext.try_get):  # before the graph has changed anything
                return compiled(*args)
        except Interrupted:
            return call(*args)
        except FailOnRecompileLimitHit as error:
            raise ConfigError("model.compile compiles too many graphs: leave model.compile off.") from error
        except (*COMPILER_ERRORS, OSError) as error:
            raise ConfigError(
                f"model.compile does not work here ({first_line(error)}): install g++ (on a GPU, Triton) and"
                " make PyTorch's cache writable, or leave model.compile off."
            ) from error

    return call


def replay(method: Callable[..., Any], tensors: Iterable[Tensor], options: dict[str, Any]) -> Any:
    """Compile a method of small operations for a GPU, which replays their launches as CUDA graphs.

    An update of SAC with 256 rows takes a quarter of the time of a graph whose kernels Python launches.
    The memory of the tensors, which the method changes in place, must stay the same.
    """
    for tensor in tensors:
        mark_static_address(tensor)
    compiled = compile_per_instance(method, options=options | {"triton.cudagraphs": True})

    def call(*args: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        return tree_map(torch.clone, compiled(*args))  # the next call overwrites its results

    return call


def of_arguments(guards: Sequence[Any]) -> list[bool]:
    """Return which guards of a compiled method to check at each call: those of its arguments.

    The other two hundred, of the module and its networks, take 80 microseconds. What they guard must not
    change as long as the graph is used.
    """
    return [not ("self" in guard.name or guard.name.startswith("G[")) for guard in guards]


def scan(step: Callable[..., Any], carry: Any, rows: Any) -> tuple[Any, Any]:
    """Return what PyTorch's ``scan`` returns for nested tensors [T, ...]; outside of a graph by a loop."""
    if torch.compiler.is_compiling():
        return scan_in_graph(step, carry, rows)
    outputs = []
    for i in range(len(tree_leaves(rows)[0])):
        carry, output = step(carry, tree_map(lambda values, i=i: values[i], rows))
        outputs.append(output)
    return carry, tree_map(lambda *values: torch.stack(values), *outputs)


def compile_scan(method: Callable[..., Any], cpp_loop: bool) -> Any:
    """Compile a method with a ``scan`` for its object alone, see :func:`compile_per_instance`.

    PyTorch stores the graph on disk, so that the next run of the same settings compiles for a shorter time.
    On the CPU, a loop in C++ takes half the time of one in Python for four CartPoles. Its compilation takes
    longer, for large graphs by minutes.
    """
    options = {**STORE_SCAN, "cpp_wrapper": True} if cpp_loop else STORE_SCAN
    return compile_per_instance(method, options=options)
