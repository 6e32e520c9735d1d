"""Recipes: YAML files that say which runs to make, in the words of the command line's flags."""

from tunerd.studies.recipes.keys import Command, Commands, Key
from tunerd.studies.recipes.recipe import PlannedRun, Recipe, plan_recipe, read_recipe
from tunerd.studies.recipes.schema import json_schema

__all__ = [
    "Command",
    "Commands",
    "Key",
    "PlannedRun",
    "Recipe",
    "json_schema",
    "plan_recipe",
    "read_recipe",
]
