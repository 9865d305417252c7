"""What is compared: the subject, its steps, the references, and workers as sides."""
