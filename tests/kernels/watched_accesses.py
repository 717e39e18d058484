"""Detects accesses outside the tensors of a kernel, which Triton's interpreter does not check."""

from types import SimpleNamespace

import torch


class Watched:
    """Counts loads and stores outside ``tensors``."""

    def __init__(self, monkeypatch, tensors):
        from triton.runtime import interpreter

        self.tensors, self.outside = tensors, 0
        stock = interpreter._interpreter
        watched = {
            name: self._watching(getattr(stock, name), place)
            for name, place in (("load", 1), ("store", 2))
        }
        others = {name: getattr(stock, name) for name in dir(stock) if name not in watched}
        monkeypatch.setattr(interpreter, "_interpreter", SimpleNamespace(**others, **watched))

    def _watching(self, call, place):
        def watching(*arguments):
            addresses = torch.from_numpy(arguments[0].astype("int64"))
            addresses = addresses[torch.from_numpy(arguments[place].astype("bool"))]
            inside = torch.zeros_like(addresses, dtype=torch.bool)
            for tensor in self.tensors:
                start = tensor.data_ptr()
                end = start + tensor.numel() * tensor.element_size()
                inside |= (addresses >= start) & (addresses < end)
            self.outside += int((~inside).sum())
            return call(*arguments)

        return watching
