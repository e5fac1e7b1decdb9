"""What the master knows of its workers: sessions, speed, and those that do not fit."""
