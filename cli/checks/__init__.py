"""What `headrace doctor` looks at. Each check yields findings as it goes, and raises nothing."""
