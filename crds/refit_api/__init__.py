"""The words that operator and runtime share. Import the module you mean; this one holds the version only."""

__version__ = "0.1.0"
