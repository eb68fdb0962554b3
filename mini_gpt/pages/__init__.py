"""HTML pages that need no network: a model or its findings in, one file out. Imports all packages before it."""
