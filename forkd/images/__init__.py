"""Images: what a parent microVM boots from, built from recipes into a cache.

Owns kernels, root filesystems and initrds on disk; boots nothing.
"""

from __future__ import annotations

from forkd.images.build import adopt_files, build
from forkd.images.catalog import find_image, list_images, remove_image
from forkd.images.recipe import Recipe, load_recipe
from forkd.images.tools import Progress

__all__ = [
    "Progress",
    "Recipe",
    "adopt_files",
    "build",
    "find_image",
    "list_images",
    "load_recipe",
    "remove_image",
]
