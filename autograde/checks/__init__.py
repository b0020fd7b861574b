"""What is graded: a folder of checks for each lesson, and beside them what several checks share."""
