"""A base class of torch's dispatch modes that leaves compiled graphs as they are."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class QuietMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """A dispatch mode that leaves compiled graphs and higher-order operators as they are."""

    # FlexAttention is one. It is called unchanged; operators inside it do not reach the mode.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True; otherwise torch would run a compiled graph operator by operator."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False; otherwise torch imports its compiler, and Triton before it is prepared."""
        return False
