"""Where texts come from, one file each. `config.data.SOURCES` names them. Imports what `data` imports."""
