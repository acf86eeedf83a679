"""Which instruction sets this build and processor have, and the operators bound to one of them."""

from hqsweep.ops import library


def available() -> list[str]:
    """From the least to the most demanding; the last is what runs unless told otherwise."""
    info = library.extension().build_info()
    names = info["isas"].split()
    return names[: names.index(info["isa"]) + 1]


class Bound:
    """The extension with its CPU loops of one instruction set."""

    def __init__(self, isa: str) -> None:
        self._C, self.isa = library.extension(), isa

    def __getattr__(self, name: str):
        return getattr(self._C, name)

    def quantize_cpu(self, *arguments):
        return self._C.quantize_cpu(*arguments[:10], self.isa, *arguments[11:])

    def find_amax_cpu(self, *arguments):
        return self._C.find_amax_cpu(*arguments[:10], self.isa, *arguments[11:])


def use(monkeypatch, isa: str) -> None:
    """hqsweep.ops runs that instruction set until the test ends."""
    bound = Bound(isa)
    for module in ("operators", "amax"):
        monkeypatch.setattr(f"hqsweep.ops.quantize.{module}.extension", lambda: bound)
