"""Settings of other libraries: read a file, translate it into a recipe, and name the differences."""
