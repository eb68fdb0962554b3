"""An HTML page in which a trained model runs, and can be edited.

engine/ computes in a worker, view/ is what the page shows. server.py answers in place of the engine for large models.
"""
