"""Compiles the parts of a model's decoder blocks once for all blocks, for a few lengths.

Blocks of one class share their code. So torch.compile translates norm, attention and
MLP of one block, and every other block runs the same machine code. This is torch's
"regional compilation" recipe.

Everything that would cause repeated translation stays outside the graph:

- lengths: rows are filled up to a multiple of ``bucket`` (``filled_rows``). After
  ``shapes`` shapes any new one runs without a compiler from then on.
- documents: their lengths are Python numbers, another tuple at each step. A graph ends
  before attention and another begins after it. The lengths are passed around it, to
  attention itself (``apart``).
- evaluation: passes without gradients run uncompiled, because a second translation for
  them would cost more than it saves.
- the key-value cache, which training doesn't use.

Forwards are bound to the instances (:mod:`hasten.parts.nn.rebind`), so names of
parameters don't change. Recomputation, which wraps a whole block, finds compiled parts
inside. A part that already has its own forward (fused kernels) isn't compiled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hasten.machine.lazy_torch import not_compiled
from hasten.parts.data.collate import IGNORED
from hasten.parts.nn import attention, rebind
from hasten.parts.nn.causal_lm import is_cache
from hasten.parts.nn.recompute import decoder_blocks

_TIMES = ("_compile.compile_inner", "compile_fx.<locals>.bw_compiler")  # backward compiles later

Forward = Callable[..., Any]


class CompiledBlocks:
    """Binds compiled forwards to the parts of a model's blocks; called with the model.

    Args:
        dynamic: one translation for every length, with lengths as symbols; slower code.
        mode: torch.compile's; ``reduce-overhead`` records CUDA graphs.
        backend: torch.compile's; ``aot_eager`` traces all and translates nothing.
        shapes: different inputs of a part that are compiled; later ones aren't.
    """

    def __init__(
        self,
        dynamic: bool = False,
        mode: str = "default",
        backend: str = "inductor",
        shapes: int = 4,
    ) -> None:
        if shapes < 1:
            raise ValueError(f"shapes is {shapes}; at least one shape has to be compiled")
        self.shapes = shapes
        self.parts = 0
        self.passes = 0  # passes of parts, with gradients, through compiled code
        self.eager_passes = 0  # passes with gradients, but of a shape beyond the limit
        self.seen: dict[str, set[tuple[object, ...]]] = {}  # part -> shapes that were compiled
        self._dynamic = dynamic
        self._settings = {"backend": backend, "dynamic": dynamic, "fullgraph": False}
        if backend == "inductor":
            self._settings["mode"] = mode
            # The key of compiled code on disk lacks the vector instructions (torch 2.13): code that
            # was generated for AVX2 and is built for AVX-512 writes beyond its buffers.
            # ATEN_CPU_CAPABILITY or a shared folder lead there.
            from torch.compiler import config

            tag = f"cpu={torch.backends.cpu.get_cpu_capability()}"
            if tag not in config.cache_key_tag:
                config.cache_key_tag += tag
        if "recompile_limit" in inspect.signature(torch.compile).parameters:
            # This class limits shapes; torch's own limit also counts other guards, such as hooks.
            self._settings["recompile_limit"] = 4 * shapes + 4
        self._graphs = mode == "reduce-overhead"
        self._seconds_before = 0.0

    def __call__(self, module: nn.Module) -> None:
        """Binds itself to the module's blocks.

        Raises:
            ValueError: no blocks, or every part of them runs code of its own already.
        """
        self._seconds_before = _seconds()
        if self._graphs:
            module.register_forward_pre_hook(_begin_pass)
        for block in decoder_blocks(module):
            for name, part in block.named_children():
                if any(rebind.has_own_forward(inner) for inner in part.modules()):
                    continue
                config: Any = getattr(part, "config", None)
                if config is not None and attention.by_documents(config):
                    attention.outside_graphs(config)  # attention runs outside the graphs
                graph = _Graph(self, f"{name}: {type(part).__name__}")
                rebind.bind(part, _compiled, graph)
                self.parts += 1
        if not self.parts:
            raise ValueError(
                "every part of the blocks runs code of its own already (fused layers), so nothing "
                "is left to compile; leave compilation out"
            )

    @property
    def seconds(self) -> float:
        """Returns the time spent compiling in this process since the blocks were bound."""
        return _seconds() - self._seconds_before

    @property
    def compiled_shapes(self) -> int:
        """Returns the largest number of compiled shapes of any part."""
        return max((len(shapes) for shapes in self.seen.values()), default=0)

    def run(self, graph: _Graph, part: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Runs a pass of a part, by its compiled code if its inputs' shape is compiled."""
        plain = rebind.usual_of(part, _compiled)
        taken = torch.is_grad_enabled()
        if taken and not self._takes(self.seen.setdefault(graph.name, set()), args, kwargs):
            self.eager_passes += 1
            taken = False
        if not taken:
            attention.lead_through(part)
            return plain(*args, **kwargs)
        self.passes += 1
        attention.lead_around(part, kwargs)
        if graph.code is None:
            graph.code = torch.compile(plain, **self._settings)
        kwargs = {name: None if is_cache(name, v) else v for name, v in kwargs.items()}
        return graph.code(*args, **kwargs)

    def _takes(
        self,
        known_shapes: set[tuple[object, ...]],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> bool:
        first = next(v for v in (*args, *kwargs.values()) if isinstance(v, Tensor))
        shape: tuple[object, ...] = () if self._dynamic else tuple(first.shape)
        if shape not in known_shapes and len(known_shapes) < self.shapes:
            known_shapes.add(shape)
        return shape in known_shapes


@not_compiled
def _begin_pass(module: nn.Module, inputs: Any) -> None:
    """Marks a new pass, so CUDA graphs may overwrite results of the last one."""
    torch.compiler.cudagraph_mark_step_begin()


class _Graph:
    """A part's compiled code, which a copy of the part doesn't share."""

    def __init__(self, owner: CompiledBlocks, name: str) -> None:
        self.owner, self.name = owner, name
        self.code: Forward | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "code": None}


def _compiled(part: nn.Module, usual: Forward, *args: Any, **kwargs: Any) -> Any:
    graph: _Graph | None = rebind.state_of(part, _compiled)
    return usual(*args, **kwargs) if graph is None else graph.owner.run(graph, part, args, kwargs)


# Inputs of a loss of preference pairs (:func:`hasten.parts.data.pairs.answers`).
OF_PAIRS = {
    *("reads", "owners", "counts", "label_counts", "weights"),
    *("scales", "reference", "prefixes"),
}


def filled_rows(inputs: Mapping[str, Any], bucket: int) -> dict[str, Any]:
    """Returns token rows padded on the right to a multiple of ``bucket`` positions, without loss.

    In a packed row the filler is a document of its own, behind all others. Inputs without
    ``input_ids``, or with tensors that aren't known here, come back as they are.
    """
    supported = {"input_ids", "labels", "position_ids", *attention.DOCUMENTS, *OF_PAIRS}
    ids = inputs.get("input_ids")
    if not isinstance(ids, Tensor) or set(inputs) - supported:
        return dict(inputs)
    length = ids.shape[1]
    more = -length % bucket
    if not more:
        return dict(inputs)
    filled = {**inputs, "input_ids": F.pad(ids, (0, more))}
    if "reads" in inputs:  # positions of all rows, one after another
        filled["reads"] = inputs["reads"] + inputs["reads"] // length * more
    elif "labels" in inputs:
        filled["labels"] = F.pad(inputs["labels"], (0, more), value=IGNORED)
    if "position_ids" in inputs:
        positions = inputs["position_ids"]
        filler = torch.arange(more, dtype=positions.dtype, device=positions.device)
        filled["position_ids"] = torch.cat([positions, filler.expand(len(positions), more)], 1)
    if "document_lengths" in inputs:
        filled["document_lengths"] = (*inputs["document_lengths"], more)
        filled["fillers"] = inputs.get("fillers", 0) + 1
    if "prefixes" in inputs:
        filled["prefixes"] = (*inputs["prefixes"], 0)
    if "boundaries" in inputs:
        ends = inputs["boundaries"]
        filled["boundaries"] = torch.cat([ends, ends[-1:] + more])
    return filled


def _seconds() -> float:
    """Returns the seconds that torch has spent compiling in this process, by its own clocks."""
    from torch._dynamo.utils import compilation_time_metrics

    return sum(sum(compilation_time_metrics.get(name, ())) for name in _TIMES)
