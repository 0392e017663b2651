"""How messages travel, and what stays for the next step."""
