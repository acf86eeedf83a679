"""Recipes: which format every tensor of every product takes, and when."""

from hqsweep.recipe.custom import CustomRecipe
from hqsweep.recipe.roles import QuantizerRole
from hqsweep.recipe.schedule import parse_recipe
from hqsweep.recipe.sectioned import Recipe
from hqsweep.recipe.sections import DpaQuantizers, LinearQuantizers

__all__ = ["CustomRecipe", "DpaQuantizers", "LinearQuantizers", "QuantizerRole", "Recipe", "parse_recipe"]
