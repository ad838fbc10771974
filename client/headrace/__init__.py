"""Submit LLM inference jobs to Headrace."""
