"""What our own parts are measured against."""
