"""One model on several ranks: what each rank holds, what ranks exchange, and how plans reach them."""
