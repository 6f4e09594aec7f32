"""What joins the library to other programs; each module names the extra that it needs."""
