"""What is compared: the subject, its steps, the exact reference, and runners of both backends."""
