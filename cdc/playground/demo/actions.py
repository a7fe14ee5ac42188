"""Actions of the demo's users: each is one source transaction over the demo's tables.

An actor owns the rows whose ids are its own, so that several actors run at once without waiting for
each other, and an actor's actions depend only on its seed. Accounts are shared: they are locked in
the order of their ids, so that payments do not deadlock.

An action takes a cursor inside a transaction and returns how many rows it changed.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable
from typing import Any, Final

from psycopg import Cursor
from psycopg.types.json import Jsonb

from cdc.playground.demo.schema import ACCOUNTS

Rows = list[Any]

_WORDS: Final = (  # noqa: SIM905 - reads as words
    "quiet copper river lantern orbit maple signal harbour ember violet thunder paper garden"
    " mirror winter engine island velvet market falcon bridge cinder meadow saffron"
).split()
_NAMES: Final = (  # noqa: SIM905 - as above
    "Ada Alan Barbara Donald Edsger Frances Grace Jean Ken Leslie Margaret Tony"
).split()
_ITEMS: Final = ("teapot", "notebook", "lamp", "umbrella", "jigsaw", "compass")
_STATUSES: Final = ("paid", "packed", "shipped", "returned")

# A row of the keyless table is identified only by its ctid.
_UPDATE_CLICK: Final = (
    "UPDATE clicks SET url = url || '?again'"
    " WHERE ctid = (SELECT ctid FROM clicks WHERE visitor %% %s = %s LIMIT 1)"
)
_DELETE_CLICK: Final = (
    "DELETE FROM clicks WHERE ctid = (SELECT ctid FROM clicks WHERE visitor %% %s = %s LIMIT 1)"
)

# Longer than a quarter of a page, so that Postgres stores the text out of line.
_LONG_WORDS: Final = (450, 1500)
# Actors remember this many rows; older ones are not changed again.
_REMEMBERED: Final = 400
# The number of searches after which the table is emptied; only searches write to it, so nothing
# else waits.
_SEARCHES_KEPT: Final = 40


class Actor:
    """One of `actors` writers, number `number`."""

    def __init__(self, number: int, actors: int, seed: int) -> None:
        self.number = number
        self.actors = actors
        self.random = random.Random(f"{seed}/{number}")  # noqa: S311 - to be repeated, not secret
        self.next_id = number
        self.users: Rows = []
        self.tweets: Rows = []
        self.follows: Rows = []
        self.orders: Rows = []
        self.searches = 0

    def recall(self, cursor: Cursor) -> None:
        """Read our own rows from the database; after a crash memory may differ from it."""
        mine = (self.actors, self.number)
        highest = self.number
        for table in ("users", "tweets", "payments", "searches"):
            cursor.execute(f"SELECT max(id) FROM {table} WHERE id %% %s = %s", mine)  # noqa: S608
            row = cursor.fetchone()
            highest = max(highest, (row and row[0]) or 0)
        self.next_id = highest + self.actors
        self.users = _column(cursor, "users WHERE id %% %s = %s ORDER BY id", mine)
        self.tweets = _column(cursor, "tweets WHERE id %% %s = %s ORDER BY id", mine)
        cursor.execute(
            "SELECT follower, followee FROM follows WHERE follower %% %s = %s ORDER BY 1, 2", mine
        )
        self.follows = cursor.fetchall()
        self.orders = _column(cursor, "orders WHERE customer %% %s = %s ORDER BY id", mine)

    def choose(self) -> Callable[[Cursor], int]:
        if len(self.users) < 5:  # noqa: PLR2004 - enough to follow each other
            return self.sign_up
        (action,) = self.random.choices(_ACTIONS, _WEIGHTS)
        return lambda cursor: action(self, cursor)

    def new_id(self) -> int:
        self.next_id += self.actors
        return self.next_id

    def _likely(self, share: float) -> bool:
        return self.random.random() < share

    # -- people -----------------------------------------------------------------------------

    def sign_up(self, cursor: Cursor) -> int:
        user = self.new_id()
        rng = self.random
        cursor.execute(
            "INSERT INTO users (id, handle, name, plan, born, interests, settings, avatar, bio)"
            " VALUES (%s, %s, %s, %s, %s::date, %s, %s, %s, %s)",
            (
                user,
                f"{rng.choice(_WORDS)}_{user}",
                rng.choice(_NAMES),
                rng.choice(("free", "free", "plus", "pro")),
                f"{rng.randrange(1950, 2010)}-{rng.randrange(1, 13):02}-14",
                rng.sample(_WORDS, rng.randrange(4)),
                Jsonb({"theme": rng.choice(("light", "dark")), "mails": self._likely(0.5)}),
                rng.randbytes(rng.randrange(40)) if self._likely(0.5) else None,
                self._bio(),
            ),
        )
        self.users.append(user)
        del self.users[:-_REMEMBERED]
        return 1

    def sign_in(self, cursor: Cursor) -> int:
        """Update a row without its long bio: Postgres does not send that."""
        return cursor.execute(
            "UPDATE users SET last_seen = clock_timestamp(), verified = %s WHERE id = %s",
            (self._likely(0.8), self.random.choice(self.users)),
        ).rowcount

    def rewrite_bio(self, cursor: Cursor) -> int:
        return cursor.execute(
            "UPDATE users SET bio = %s, settings = settings || '{\"edited\": true}' WHERE id = %s",
            (self._bio(), self.random.choice(self.users)),
        ).rowcount

    def change_key(self, cursor: Cursor) -> int:
        """Change a key: a delete of the old and a create of the new."""
        index = self.random.randrange(len(self.users))
        old, self.users[index] = self.users[index], self.new_id()
        cursor.execute("UPDATE users SET id = %s WHERE id = %s", (self.users[index], old))
        return 2 * cursor.rowcount

    def delete_user(self, cursor: Cursor) -> int:
        """Delete a user with its tweets and follows, in one transaction."""
        user = self.users.pop(self.random.randrange(len(self.users)))
        changed = 0
        for sql in (
            "DELETE FROM tweets WHERE author = %s",
            "DELETE FROM follows WHERE follower = %s",
            "DELETE FROM users WHERE id = %s",
        ):
            changed += cursor.execute(sql, (user,)).rowcount
        self.follows = [pair for pair in self.follows if pair[0] != user]
        return changed

    def _bio(self) -> str | None:
        if self._likely(0.4):
            return None
        long = self._likely(0.5)
        return self._text(*_LONG_WORDS) if long else self._text(3, 12)

    def _text(self, fewest: int, most: int) -> str:
        return " ".join(self.random.choices(_WORDS, k=self.random.randrange(fewest, most)))

    # -- tweets and follows -----------------------------------------------------------------

    def tweet(self, cursor: Cursor) -> int:
        tweet = self.new_id()
        cursor.execute(
            "INSERT INTO tweets (id, author, body) VALUES (%s, %s, %s)",
            (tweet, self.random.choice(self.users), self._text(4, 24)),
        )
        self.tweets.append(tweet)
        del self.tweets[:-_REMEMBERED]
        return 1

    def like(self, cursor: Cursor) -> int:
        if not self.tweets:
            return self.tweet(cursor)
        return cursor.execute(
            "UPDATE tweets SET likes = likes + 1, score = ln(2 + likes) * %s WHERE id = %s",
            (self.random.random(), self.random.choice(self.tweets)),
        ).rowcount

    def edit(self, cursor: Cursor) -> int:
        if not self.tweets:
            return self.tweet(cursor)
        return cursor.execute(
            "UPDATE tweets SET body = %s, edited_at = clock_timestamp() WHERE id = %s",
            (self._text(4, 24), self.random.choice(self.tweets)),
        ).rowcount

    def delete_tweet(self, cursor: Cursor) -> int:
        if not self.tweets:
            return self.tweet(cursor)
        tweet = self.tweets.pop(self.random.randrange(len(self.tweets)))
        return cursor.execute("DELETE FROM tweets WHERE id = %s", (tweet,)).rowcount

    def follow(self, cursor: Cursor) -> int:
        pair = (self.random.choice(self.users), self.random.randrange(1, 500))
        if pair in self.follows:
            return self.unfollow(cursor)
        cursor.execute(
            "INSERT INTO follows (follower, followee) VALUES (%s, %s) ON CONFLICT DO NOTHING", pair
        )
        self.follows.append(pair)
        return cursor.rowcount

    def follow_another(self, cursor: Cursor) -> int:
        """Change one column of a composite key."""
        if not self.follows:
            return self.follow(cursor)
        index = self.random.randrange(len(self.follows))
        follower, old = self.follows[index]
        new = (follower, self.random.randrange(500, 1000))
        if new in self.follows:
            return self.unfollow(cursor)
        cursor.execute(
            "UPDATE follows SET followee = %s WHERE follower = %s AND followee = %s",
            (new[1], follower, old),
        )
        self.follows[index] = new
        return 2 * cursor.rowcount

    def unfollow(self, cursor: Cursor) -> int:
        if not self.follows:
            return self.follow(cursor)
        pair = self.follows.pop(self.random.randrange(len(self.follows)))
        return cursor.execute(
            "DELETE FROM follows WHERE follower = %s AND followee = %s", pair
        ).rowcount

    # -- what they buy ----------------------------------------------------------------------

    def pay(self, cursor: Cursor) -> int:
        """Move money between two accounts and record it, all three rows or none."""
        source, target = self.random.sample(range(1, ACCOUNTS + 1), 2)
        amount = f"{self.random.randrange(1, 5000) / 100:.2f}"
        moves = sorted(((source, f"-{amount}"), (target, amount)))
        for account, by in moves:
            cursor.execute(
                "UPDATE accounts SET balance = balance + %s::numeric, version = version + 1"
                " WHERE id = %s",
                (by, account),
            )
        cursor.execute(
            "INSERT INTO payments (id, from_account, to_account, amount, memo)"
            " VALUES (%s, %s, %s, %s::numeric, %s)",
            (self.new_id(), source, target, amount, self.random.choice((None, self._text(1, 5)))),
        )
        return 3

    def order(self, cursor: Cursor) -> int:
        order = uuid.UUID(int=self.random.getrandbits(128), version=4)
        rng = self.random
        items = [{"item": item, "n": rng.randrange(1, 4)} for item in rng.sample(_ITEMS, k=2)]
        cursor.execute(
            "INSERT INTO orders (id, customer, items, total, deliver_on, deliver_at)"
            " VALUES (%s, %s, %s, %s::numeric, current_date + %s, %s::time)",
            (
                order,
                rng.choice(self.users),
                Jsonb(items),
                f"{rng.randrange(100, 100_000) / 100:.2f}",
                rng.randrange(1, 10),
                f"{rng.randrange(8, 20):02}:30:15.25" if self._likely(0.7) else None,
            ),
        )
        self.orders.append(order)
        del self.orders[:-_REMEMBERED]
        return 1 + self.pay(cursor)

    def change_order_status(self, cursor: Cursor) -> int:
        if not self.orders:
            return self.order(cursor)
        return cursor.execute(
            "UPDATE orders SET status = %s WHERE id = %s",
            (self.random.choice(_STATUSES), self.random.choice(self.orders)),
        ).rowcount

    # -- searches and clicks ----------------------------------------------------------------

    def search(self, cursor: Cursor) -> int:
        """Write a search; empty the table when it has grown."""
        self.searches += 1
        if self.number == 0 and self.searches > _SEARCHES_KEPT:
            self.searches = 0
            cursor.execute("TRUNCATE searches")
            return 1
        cursor.execute(
            "INSERT INTO searches (id, words, hits, took, waited)"
            " VALUES (%s, %s, %s, %s, %s::interval)",
            (
                self.new_id(),
                self._text(1, 4),
                self.random.choice((None, self.random.randrange(1000))),
                self.random.random(),
                f"{self.random.randrange(3000)} ms",
            ),
        )
        return 1

    def click(self, cursor: Cursor) -> int:
        """Write several rows of the keyless table, some of them identical."""
        count = self.random.randrange(1, 4) if self._likely(0.97) else 120
        return cursor.execute(
            "INSERT INTO clicks (visitor, url, address)"
            " SELECT %s, %s || n %% 5, %s::inet FROM generate_series(1, %s) n",
            (
                self.random.choice(self.users),
                f"/shop/{self.random.choice(_ITEMS)}/",
                f"10.{self.random.randrange(256)}.0.{self.random.randrange(1, 255)}",
                count,
            ),
        ).rowcount

    def change_click(self, cursor: Cursor) -> int:
        """Change or delete one row of the table without a key."""
        return cursor.execute(
            self.random.choice((_UPDATE_CLICK, _DELETE_CLICK, _DELETE_CLICK)),
            (self.actors, self.number),
        ).rowcount

    # -- rolled back ------------------------------------------------------------------------

    def roll_back_to_savepoint(self, cursor: Cursor) -> int:
        """Roll back to a savepoint: of three steps only the first and the last stay."""
        changed = self.click(cursor)
        cursor.execute("SAVEPOINT second_thoughts")
        cursor.execute("UPDATE accounts SET version = version + 1000 WHERE id = %s", (1,))
        cursor.execute("DELETE FROM clicks WHERE visitor = %s", (self.users[0],))
        cursor.execute("ROLLBACK TO SAVEPOINT second_thoughts")
        return changed + self.sign_in(cursor)


_CHOICES: Final[dict[Callable[[Actor, Cursor], int], int]] = {
    Actor.sign_up: 5,
    Actor.sign_in: 14,
    Actor.rewrite_bio: 3,
    Actor.change_key: 1,
    Actor.delete_user: 2,
    Actor.tweet: 14,
    Actor.like: 14,
    Actor.edit: 3,
    Actor.delete_tweet: 4,
    Actor.follow: 8,
    Actor.follow_another: 2,
    Actor.unfollow: 3,
    Actor.pay: 7,
    Actor.order: 4,
    Actor.change_order_status: 6,
    Actor.search: 8,
    Actor.click: 8,
    Actor.change_click: 8,
    Actor.roll_back_to_savepoint: 2,
}
_ACTIONS: Final = tuple(_CHOICES)
_WEIGHTS: Final = tuple(_CHOICES.values())


def _column(cursor: Cursor, source: str, values: tuple[int, int]) -> Rows:
    cursor.execute(f"SELECT id FROM {source}", values)  # noqa: S608 - names from this module
    return [row[0] for row in cursor.fetchall()][-_REMEMBERED:]
