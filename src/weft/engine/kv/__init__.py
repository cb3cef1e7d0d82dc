"""What layers keep of the tokens they have seen: declared, allocated, handed out to requests, and reused."""
