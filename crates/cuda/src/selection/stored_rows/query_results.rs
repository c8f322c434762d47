//! What wishes come to: draws, or kept tokens, which come down in no order and are sorted here.

use super::{KEPT, KEPT_AT, MAX_ITEMS, StoredRows, by_item};
use crate::abi::{DeviceAddress, Draw, status};
use crate::device::results;
use crate::error::CudaError;
use crate::selection::queries::{CanonicalInputs, Kind, Query, QueryResults};
use core::cmp::Reverse;
use cudarc::driver::CudaStream;
use flash_sampling_core::{Candidate, Winner};
use std::sync::Arc;

impl StoredRows {
    /// Grants wishes and appends what they come to; with canonical inputs by canonical scores and logits. Waits.
    pub(crate) fn keep(
        &mut self,
        kind: Kind,
        wishes: &[Query],
        canonical: Option<&CanonicalInputs>,
        granted: &mut QueryResults,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let mut rest = wishes;
        while !rest.is_empty() {
            let mut room = self.capacity;
            let fits = |wish: &&Query| {
                let asked = if kind == Kind::Lists { (wish.item.limit as usize).min(self.tokens.len()) } else { 0 };
                let fits = asked <= room;
                room = room.saturating_sub(asked);
                fits
            };
            let count = rest.iter().take(MAX_ITEMS).take_while(fits).count();
            let (part, after) = rest.split_at(count);
            self.keep_part(kind, part, canonical, granted, stream)?;
            rest = after;
        }
        Ok(())
    }

    fn keep_part(
        &mut self,
        kind: Kind,
        wishes: &[Query],
        canonical: Option<&CanonicalInputs>,
        granted: &mut QueryResults,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        self.launch(kind, wishes, canonical, stream)?;
        if kind == Kind::Draws && canonical.is_none() {
            return self.grant_draws(wishes.len(), granted, stream);
        }
        // Of lists it is known how many there are at most.
        let most = |wish: &Query| (wish.item.limit as usize).min(self.tokens.len());
        let expected = match kind {
            Kind::Lists if canonical.is_none() => wishes.iter().map(most).sum(),
            _ => self.expected,
        };
        let count = self.fetch_kept(expected.min(self.capacity), stream)?;
        if count > self.capacity {
            // Near ties without number: the items of one half at a time. One item has room for every token.
            let (first, second) = wishes.split_at(wishes.len() / 2);
            if first.is_empty() {
                return Err(CudaError::Corrupt { what: "more tokens" });
            }
            self.keep_part(kind, first, canonical, granted, stream)?;
            return self.keep_part(kind, second, canonical, granted, stream);
        }
        if kind != Kind::Lists {
            // A little more than this time: rows of a model are alike.
            self.expected = count + count / 4;
        }
        let kept = bytemuck::cast_slice(&self.results.bytes()?[KEPT_AT..KEPT_AT + count * KEPT]);
        by_item(kept, wishes.len(), &mut self.kept_here, &mut self.kept_ends)?;
        self.grant_kept(wishes, granted);
        Ok(())
    }

    /// Waits for the draws of a part and grants them.
    fn grant_draws(
        &mut self,
        count: usize,
        granted: &mut QueryResults,
        stream: &Arc<CudaStream>,
    ) -> Result<(), CudaError> {
        let failed = CudaError::driver("fetch draws from stored logits");
        self.draws_here.resize(count, Draw::default());
        stream.memcpy_dtoh(&self.draws.slice(..count), &mut self.draws_here).map_err(&failed)?;
        stream.synchronize().map_err(&failed)?;
        self.draw.settle();
        results::written(&self.draws_here)?;
        for draw in &self.draws_here {
            let winner = Winner::new(draw.score, draw.token);
            granted.push((draw.status == status::DRAWN).then_some(Candidate { winner, logit: draw.logit }));
        }
        Ok(())
    }

    /// Waits for kept tokens: how many there are, and the tokens where there is room for them. As many as are `expected` come
    /// with their count, the rest after it.
    fn fetch_kept(&mut self, expected: usize, stream: &Arc<CudaStream>) -> Result<usize, CudaError> {
        let failed = CudaError::driver("fetch tokens kept of stored logits");
        let (queue, kept) = (StoredRows::queue(stream), DeviceAddress::of(&self.kept, stream));
        self.results.copy_down(DeviceAddress::of(&self.count, stream), 0, size_of::<u64>(), queue)?;
        self.results.copy_down(kept, KEPT_AT, expected * KEPT, queue)?;
        stream.synchronize().map_err(&failed)?;
        self.draw.settle();
        let count = bytemuck::pod_read_unaligned::<u64>(&self.results.bytes()?[..size_of::<u64>()]) as usize;
        if (expected + 1..=self.capacity).contains(&count) {
            let (from, size) = (expected * KEPT, (count - expected) * KEPT);
            self.results.copy_down(kept.add(expected), KEPT_AT + from, size, queue)?;
            stream.synchronize().map_err(&failed)?;
        }
        Ok(count)
    }

    /// The best of each item's tokens, which lie in the order of their items.
    fn grant_kept(&mut self, wishes: &[Query], granted: &mut QueryResults) {
        let mut from = 0;
        for (wish, &end) in wishes.iter().zip(&self.kept_ends) {
            let own = &mut self.kept_here[from..end];
            from = end;
            own.sort_unstable_by_key(|kept| Reverse(kept.key));
            let best = own.iter().filter(|kept| kept.key != 0).take(wish.item.limit as usize);
            granted.push(best.map(|kept| Candidate { winner: Winner::from_ordered_bits(kept.key), logit: kept.logit }));
        }
    }
}
