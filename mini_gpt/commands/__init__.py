"""One file for each command and each suite. Imports all other packages."""
