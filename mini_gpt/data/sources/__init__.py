"""Where texts come from, one file each. `corpora.SOURCES` names them. Imports what `data` imports."""
