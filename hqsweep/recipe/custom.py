"""CustomRecipe: a recipe as a Python function, for what the sections of a declarative one cannot say."""

import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hqsweep.errors import UserError
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.base import Change
from hqsweep.recipe.factories import FactoryName
from hqsweep.recipe.pairs import MODULE_GEMMS
from hqsweep.recipe.roles import TENSOR_TYPES, QuantizerRole
from hqsweep.recipe.sections import HIGH_PRECISION


@dataclass(frozen=True, kw_only=True)
class CustomRecipe:
    """qfactory(role) gives the quantizer of a slot; it is called once for each slot of a model. Experimental.

    It returns a HybridQuantizer, its text ("nvfp4|mxfp8"), or a request: an object whose quantizer(role) gives one.
    It is asked for every tensor that a product reads: those of linears (the head is the one named "head") and grouped
    linears, and with fp8_dpa those of attention. All else stays in high precision, and so does a slot for which it
    returns "bf16"; None is an error, for it may mean that the factory forgot the slot. Two recipes are equal when their
    factory is the same function, so a factory must depend on the role alone: one that changed its mind is taken anew by
    set_recipe only.
    """

    qfactory: Callable[[QuantizerRole], Any]
    fp8_dpa: bool = False
    """Whether attention is quantized (TransformerEngine's name; the format is what the factory says)."""
    gemm: str = "exact"
    schedule: tuple[Change, ...] = ()

    @property
    def is_name(self) -> bool:
        """Whether the factory is a name alone, which was not imported."""
        return isinstance(self.qfactory, FactoryName)

    @property
    def path(self) -> str:
        """module.name of the factory, by which it is found again.

        Raises UserError for a function that cannot be found by name, such as a lambda.
        """
        if isinstance(self.qfactory, FactoryName):
            return self.qfactory.path
        module, name = getattr(self.qfactory, "__module__", None), getattr(self.qfactory, "__qualname__", "")
        if getattr(sys.modules.get(module), name, None) is not self.qfactory:
            raise UserError(
                f"recipe.qfactory: {name or self.qfactory!r} cannot be found by its name in {module}, so that it can"
                " neither be pickled nor written to a config; define it at the top of a module"
            )
        return f"{module}.{name}"

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            pickle.dumps(self.qfactory)
        except (pickle.PicklingError, AttributeError, TypeError):
            raise UserError(
                f"recipe.qfactory: {self.qfactory!r} cannot be pickled; define it at the top of a module"
            ) from None
        return _rebuild, (self.qfactory, self.fp8_dpa, self.gemm, self.schedule)

    def to_config(self) -> dict[str, Any]:
        """Path of the factory and the other fields; no schedule."""
        return {"qfactory": self.path, "fp8_dpa": self.fp8_dpa, "gemm": self.gemm}

    def for_layers(self, layers: Sequence[int]) -> "CustomRecipe":
        """The recipe itself: a factory knows a layer by the name of its role."""
        return self

    def resolve(self, roles: Iterable[QuantizerRole | None]) -> dict[QuantizerRole, HybridQuantizer]:
        """The quantizer of each role; None roles (boundary slots without a reader) are left out.

        Raises:
            UserError: the factory failed, or returned something else.
            ValueError: the role is of no module.
        """
        return {role: self.quantizer(role) for role in dict.fromkeys(roles) if role is not None}

    def quantizer(self, role: QuantizerRole) -> HybridQuantizer:
        """The quantizer of one slot; raises as resolve does."""
        if role.tensor_type not in TENSOR_TYPES.get(role.module_type, ()):
            raise ValueError(f"no slot {role}; module types and their tensors: {TENSOR_TYPES}")
        if role.module_type not in MODULE_GEMMS:
            return HIGH_PRECISION[role.module_type]
        if role.module_type == "dpa" and not self.fp8_dpa:
            return getattr(HIGH_PRECISION["dpa"], role.tensor_type)
        where = f"recipe.qfactory: {getattr(self.qfactory, '__qualname__', self.qfactory)}({role})"
        try:
            answer = self.qfactory(role)
            answer = answer.quantizer(role) if hasattr(answer, "quantizer") else answer
            if isinstance(answer, HybridQuantizer | str):
                return HybridQuantizer.parse(answer)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        except Exception as error:
            raise UserError(f"{where} raised {type(error).__name__}: {error}") from error
        leaves_out = "; 'bf16' leaves the slot in high precision" if answer is None else ""
        raise UserError(
            f"{where} returned {answer!r}; it must return a HybridQuantizer, its text, or a request for one{leaves_out}"
        )


def _rebuild(qfactory: Callable, fp8_dpa: bool, gemm: str, schedule: tuple[Change, ...]) -> CustomRecipe:
    return CustomRecipe(qfactory=qfactory, fp8_dpa=fp8_dpa, gemm=gemm, schedule=schedule)
