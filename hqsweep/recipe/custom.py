"""CustomRecipe: a recipe as a Python function, for cases that sections cannot express."""

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
    """A recipe whose qfactory(role) gives the quantizer of each slot. Experimental.

    The factory returns a HybridQuantizer, its text ("nvfp4|mxfp8"), or a request: an object whose quantizer(role)
    returns one. It is asked for every tensor that a product reads: tensors of linears (the head is named "head") and of
    grouped linears, and with fp8_dpa tensors of attention. Everything else stays in high precision, as does a slot for
    which it returns "bf16". None is an error, since the factory may have forgotten the slot.

    Under autocast the factory is asked once per slot in each `with`, and the answers hold for that long. A factory that
    changes its answers is followed by the next autocast, its backward and its recomputations. set_recipe asks once per
    slot of a model. A module built with the recipe asks when it is built. Recipes with the same function are equal.

    Under autocast the factory is also asked for boundaries, as in TransformerEngine. The role is None for a linear's
    output and its input's gradient, unless a role names their reader. With fp8_dpa, attention's boundaries have the
    roles QuantizerRole(name="NAME.dpa_output") and "NAME.dpa_grad_input". Nothing is rounded there, whatever the
    answer. A failing factory, and None as answer, are errors as for any slot.
    """

    qfactory: Callable[[QuantizerRole], Any]
    fp8_dpa: bool = False
    """Whether attention is quantized (TransformerEngine's name; the factory chooses the format)."""
    gemm: str = "exact"
    schedule: tuple[Change, ...] = ()

    @property
    def is_name(self) -> bool:
        """Whether the factory is only a name that was not imported."""
        return isinstance(self.qfactory, FactoryName)

    @property
    def path(self) -> str:
        """module.name of the factory, by which it can be imported again.

        UserError for a function that cannot be found by name, such as a lambda.
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
        """Return the factory's path and the other fields, without the schedule."""
        return {"qfactory": self.path, "fp8_dpa": self.fp8_dpa, "gemm": self.gemm}

    def for_layers(self, layers: Sequence[int]) -> "CustomRecipe":
        """Return the recipe itself: a factory knows layers by the names in roles."""
        return self

    def resolve(self, roles: Iterable[QuantizerRole | None]) -> dict[QuantizerRole, HybridQuantizer]:
        """Return role -> quantizer for the roles of a model; None roles (boundary slots without a reader) are left out.

        Raises:
            UserError: the factory failed, or returned something else.
            ValueError: the role belongs to no module.
        """
        return {role: self.quantizer(role) for role in dict.fromkeys(roles) if role is not None}

    def quantizer(self, role: QuantizerRole) -> HybridQuantizer:
        """Return the quantizer of one slot. Raises as resolve() does."""
        if role.tensor_type not in TENSOR_TYPES.get(role.module_type, ()):
            raise ValueError(f"no slot {role}; module types and their tensors: {TENSOR_TYPES}")
        if role.module_type not in MODULE_GEMMS:
            return HIGH_PRECISION[role.module_type]
        if role.module_type == "dpa" and not self.fp8_dpa:
            return getattr(HIGH_PRECISION["dpa"], role.tensor_type)
        return self._asked(role)

    def entered(self) -> "CustomRecipe":
        """Return the recipe for one autocast(), which asks the factory once per slot."""
        return _Entered(qfactory=self.qfactory, fp8_dpa=self.fp8_dpa, gemm=self.gemm, schedule=self.schedule)

    @property
    def answers_of(self) -> object:
        """The recipe itself; inside an autocast(), a value for this autocast's answers."""
        return self

    def check_boundary(self, role: QuantizerRole | None) -> None:
        """Ask the factory for a boundary slot that rounds nothing. Raises as quantizer() does."""
        if role is None or self.fp8_dpa:
            self._asked(role)

    def _asked(self, role: QuantizerRole | None) -> HybridQuantizer | None:
        """Return the factory's answer for a role; None for a request without a slot of its own."""
        without = role is None or not role.module_type
        try:
            answer = self.qfactory(role)
            if hasattr(answer, "quantizer"):
                if without:
                    return None
                answer = answer.quantizer(role)
            if isinstance(answer, str):
                # torch 2.11's trace cannot compare constants
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
    """Equal only to itself. A trace cannot prove that for a plain object."""

    def __ne__(self, other: object) -> bool:
        return self is not other


@dataclass(frozen=True, kw_only=True, eq=False)
class _Entered(CustomRecipe):
    """A CustomRecipe in one autocast(). It remembers answers, and equals recipes that have given no other answers."""

    answers: dict[QuantizerRole | None, HybridQuantizer | None] = field(default_factory=dict)
    scope: object = field(default_factory=lambda: _Scope())
    """A value unique to this autocast()."""

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
        if role is not None and role in self.answers:  # TransformerEngine asks with None for each boundary
            return self.answers[role]
        answer = super()._asked(role)
        if not torch.compiler.is_compiling():  # torch 2.11: a trace that writes to a dict reads no class attribute
            self.answers[role] = answer
        return answer


@memo
def _parsed(text: str) -> HybridQuantizer:
    return HybridQuantizer.parse(text)


def _rebuild(qfactory: Callable, fp8_dpa: bool, gemm: str, schedule: tuple[Change, ...]) -> CustomRecipe:
    return CustomRecipe(qfactory=qfactory, fp8_dpa=fp8_dpa, gemm=gemm, schedule=schedule)
