"""What makes a release of the project: packages, their check, and a bill of materials."""
