"""What a person types: one file for each command and each suite. Imports all other rooms."""
