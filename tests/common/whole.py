"""Full weights of a model that ranks hold in parts."""

from __future__ import annotations

from torch import Tensor

from hasten.core.setup import Session
from hasten.models.weight_files import weight_source


def whole_weights(session: Session) -> dict[str, Tensor]:
    """Parameters and saved buffers by name on the first rank, {} on others; all ranks call it."""
    layout, model = session.setup.layout, session.model
    source = weight_source(layout)
    with source.all_modules(model):
        saved = model.state_dict(keep_vars=True)
        named = {n: t for n, t in (*model.named_parameters(), *model.named_buffers()) if n in saved}
        full = {n: source.gather_weight(t, t.dtype).clone() for n, t in named.items()}
    return full if session.setup.context.world.is_main else {}
