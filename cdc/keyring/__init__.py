"""A key for each subject: what encrypts a person's columns, and what is deleted to forget them.

A column with the mask `encrypt` is written as its ciphertext wherever the row goes: topics,
archive, bases, followers. All values of one subject, in any table, have one key. Deleting that key
makes every copy unreadable at once, also those that nobody can reach.

- `contract`: what a keyring does, ours or a plugin's
- `file`: the keyring that is a local file
- `ciphers`: encrypts and decrypts with a keyring; needs the extra `keyring`
- `opening`: opens the configured keyring, once in each process
"""
