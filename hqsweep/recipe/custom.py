"""CustomRecipe: a recipe as a Python function, for what the sections of a declarative one cannot say."""

import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hqsweep.errors import UserError
from hqsweep.memo import memo
from hqsweep.quant.hybrid import HybridQuantizer
from hqsweep.recipe.base import Change
from hqsweep.recipe.factories import FactoryName
from hqsweep.recipe.pairs import MODULE_GEMMS
from hqsweep.recipe.roles import TENSOR_TYPES, QuantizerRole
from hqsweep.recipe.sections import HIGH_PRECISION


@dataclass(frozen=True, kw_only=True)
class CustomRecipe:
    """qfactory(role) gives the quantizer of a slot. Experimental.

    It returns a HybridQuantizer, its text ("nvfp4|mxfp8"), or a request: an object whose quantizer(role) gives one.
    It is asked for every tensor that a product reads: those of linears (the head is the one named "head") and grouped
    linears, and with fp8_dpa those of attention. All else stays in high precision, and so does a slot for which it
    returns "bf16"; None is an error, for it may mean that the factory forgot the slot.

    Under autocast it is asked once for each slot in each `with`, so that answers hold for that long: one that changes
    its mind is followed by the next autocast, by its backward, and by what that computes again. set_recipe asks once
    for each slot of a model; modules that are built with the recipe ask when they are built. Two recipes are equal when
    their factory is the same function.

    Under autocast it is also asked for boundaries, as in TransformerEngine: with None for the output of a linear and
    the gradient of its input, unless a role says who reads them; with fp8_dpa, for those of attention, with the roles
    QuantizerRole(name="NAME.dpa_output") and "NAME.dpa_grad_input". Nothing is rounded there, whatever the answer; an
    error of the factory, or None for an answer, is an error as for any slot.
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
        return self._asked(role)

    def entered(self) -> "CustomRecipe":
        """The recipe for one autocast(), which asks the factory for each slot once."""
        return _Entered(qfactory=self.qfactory, fp8_dpa=self.fp8_dpa, gemm=self.gemm, schedule=self.schedule)

    @property
    def answers_of(self) -> object:
        """The recipe itself; within an autocast() its own answers."""
        return self

    def check_boundary(self, role: QuantizerRole | None) -> None:
        """Ask the factory for a boundary slot that rounds nothing; raises as quantizer() does."""
        if role is None or self.fp8_dpa:
            self._asked(role)

    def _asked(self, role: QuantizerRole | None) -> HybridQuantizer | None:
        """The factory's answer for a role; None for a request without a slot of its own."""
        without = role is None or not role.module_type
        try:
            answer = self.qfactory(role)
            if hasattr(answer, "quantizer"):
                if without:
                    return None
                answer = answer.quantizer(role)
            if isinstance(answer, str):
                # of a constant torch 2.11's trace has no comparison
                return HybridQuantizer.parse(answer) if torch.compiler.is_compiling() else _parsed(answer)
            if isinstance(answer, HybridQuantizer):
                return answer
            text = f" returned {answer!r}; it must return a HybridQuantizer, its text, or a request for one"
            hint, cause = "" if answer is not None else "; 'bf16' leaves the slot in high precision", None
        except UserError as error:
            text, hint, cause = f": {error}", "", None
        except Exception as error:
            text, hint, cause = f" raised {type(error).__name__}: {error}", "", error
        if without:
            hint = "; outputs and gradients of inputs that nobody reads are asked for so: return 'bf16' for them"
        name = getattr(self.qfactory, "__qualname__", self.qfactory)
        raise UserError(f"recipe.qfactory: {name}({role}){text}{hint}") from cause


class _Scope:
    """Equal to itself alone, which a trace reads of no plain object."""

    def __ne__(self, other: object) -> bool:
        return self is not other


@dataclass(frozen=True, kw_only=True, eq=False)
class _Entered(CustomRecipe):
    """A CustomRecipe in one autocast(). It remembers answers, and is equal to one that has given no other answers."""

    answers: dict[QuantizerRole | None, HybridQuantizer | None] = field(default_factory=dict)
    scope: object = field(default_factory=lambda: _Scope())
    """What is this autocast()'s alone."""

    @property
    def answers_of(self) -> object:
        return self.scope

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CustomRecipe):
            return NotImplemented
        others = other.answers if isinstance(other, _Entered) else {}
        alike = all(others.get(role, answer) == answer for role, answer in self.answers.items())
        return alike and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> tuple[Any, ...]:
        return self.qfactory, self.fp8_dpa, self.gemm, self.schedule

    def entered(self) -> CustomRecipe:
        return self

    def _asked(self, role: QuantizerRole | None) -> HybridQuantizer | None:
        if role in self.answers:
            return self.answers[role]
        answer = super()._asked(role)
        if not torch.compiler.is_compiling():  # torch 2.11 reads no attribute of a class once a trace writes to a dict
            self.answers[role] = answer
        return answer


@memo
def _parsed(text: str) -> HybridQuantizer:
    return HybridQuantizer.parse(text)


def _rebuild(qfactory: Callable, fp8_dpa: bool, gemm: str, schedule: tuple[Change, ...]) -> CustomRecipe:
    return CustomRecipe(qfactory=qfactory, fp8_dpa=fp8_dpa, gemm=gemm, schedule=schedule)
