"""What `headrace doctor` looks at. Each check returns findings and raises nothing."""
