"""One file for each command. Imports all other packages."""
