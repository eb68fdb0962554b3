"""One file for each command, which reads its flags. Imports all other packages."""
