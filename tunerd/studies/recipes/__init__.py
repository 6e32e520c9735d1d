"""Recipes: YAML files that say which runs to make, in the words of the command line's flags."""

from tunerd.studies.recipes.recipe import Command, PlannedRun, Recipe, plan_recipe, read_recipe
from tunerd.studies.recipes.schema import json_schema

__all__ = ["Command", "PlannedRun", "Recipe", "json_schema", "plan_recipe", "read_recipe"]
