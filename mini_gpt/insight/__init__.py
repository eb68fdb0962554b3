"""What a model's attention does, in numbers and pictures."""
