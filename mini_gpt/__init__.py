"""Train small GPTs, and measure their attention and positional encodings."""
