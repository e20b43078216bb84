"""The host tier of a prefix cache: conversations that are not being answered
are kept here, in pages, and come back when their next turn does."""

import asyncio


class HostPool:
    def __init__(self, page_size, transfer_s):
        self.page_size, self.transfer_s = page_size, transfer_s
        self.pages = {}  # by prefix: its rows
        self.staging = []  # of copies that end in the middle of a page

    def backup(self, prefix, rows):
        self.pages[prefix] = list(rows)

    async def load(self, prefix):
        rows = self.pages.get(prefix)
        if rows is None:
            return None
        if len(rows) % self.page_size != 0:
            return await self.copy_tokens(rows)
        return await self.copy_pages(rows)

    async def copy_pages(self, rows):
        copy = list(rows)
        await asyncio.sleep(self.transfer_s)
        return copy

    async def copy_tokens(self, rows):
        """Row by row, through a buffer that all such copies share."""
        self.staging[:] = rows
        await asyncio.sleep(self.transfer_s)
        return list(self.staging)
