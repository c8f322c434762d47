//! The results of queries: draws, or kept tokens. Kept tokens arrive in no order, and the host sorts them.

use super::{KEPT, KEPT_AT, MAX_ITEMS, StoredRows, by_item};
use crate::abi::{DeviceAddress, Draw, status};
use crate::device::results;
use crate::error::CudaError;
use crate::selection::{CanonicalInputs, Kind, Query, QueryResults};
use core::cmp::Reverse;
use flash_sampling_core::backend::{Candidate, Winner};

impl StoredRows {
    /// Runs queries, waits, and appends their results. With canonical inputs, scores and logits are canonical.
    pub(crate) fn run_queries(
        &mut self,
        kind: Kind,
        queries: &[Query],
        canonical: Option<&CanonicalInputs>,
        out: &mut QueryResults,
    ) -> Result<(), CudaError> {
        let mut rest = queries;
        while !rest.is_empty() {
            let mut room = self.capacity;
            let fits = |query: &&Query| {
                let needed = if kind == Kind::Lists { (query.item.limit as usize).min(self.tokens.len()) } else { 0 };
                let fits = needed <= room;
                room = room.saturating_sub(needed);
                fits
            };
            let count = rest.iter().take(MAX_ITEMS).take_while(fits).count();
            let (part, after) = rest.split_at(count);
            self.run_part(kind, part, canonical, out)?;
            rest = after;
        }
        Ok(())
    }

    fn run_part(
        &mut self,
        kind: Kind,
        queries: &[Query],
        canonical: Option<&CanonicalInputs>,
        out: &mut QueryResults,
    ) -> Result<(), CudaError> {
        self.launch(kind, queries, canonical)?;
        if kind == Kind::Draws && canonical.is_none() {
            return self.take_draws(queries.len(), out);
        }
        // Lists have a known maximum number of tokens.
        let most = |query: &Query| (query.item.limit as usize).min(self.tokens.len());
        let expected = match kind {
            Kind::Lists if canonical.is_none() => queries.iter().map(most).sum(),
            _ => self.expected,
        };
        let count = self.fetch_kept(expected.min(self.capacity))?;
        if count > self.capacity {
            // Too many near ties: run each half of the queries alone. A single query has room for every token.
            let (first, second) = queries.split_at(queries.len() / 2);
            if first.is_empty() {
                return Err(CudaError::Corrupt { what: "more tokens than a row has" });
            }
            self.run_part(kind, first, canonical, out)?;
            return self.run_part(kind, second, canonical, out);
        }
        if kind != Kind::Lists {
            // The next call needs about as many tokens, so expect a quarter more than this time.
            self.expected = count + count / 4;
        }
        let kept = bytemuck::cast_slice(&self.results.bytes()?[KEPT_AT..KEPT_AT + count * KEPT]);
        by_item(kept, queries.len(), &mut self.kept_here, &mut self.kept_ends)?;
        self.take_kept(queries, out);
        Ok(())
    }

    /// Waits for the draws of a part, and appends them.
    fn take_draws(&mut self, count: usize, out: &mut QueryResults) -> Result<(), CudaError> {
        let failed = CudaError::driver("fetch draws from stored logits");
        self.draws_here.resize(count, Draw::default());
        self.stream.memcpy_dtoh(&self.draws.slice(..count), &mut self.draws_here).map_err(&failed)?;
        self.stream.synchronize().map_err(&failed)?;
        self.draw.mark_idle();
        results::written(&self.draws_here)?;
        for draw in &self.draws_here {
            let winner = Winner::new(draw.score, draw.token);
            out.push((draw.status == status::DRAWN).then_some(Candidate { winner, logit: draw.logit }));
        }
        Ok(())
    }

    /// Waits for the kept tokens, and returns their count. The first `expected` tokens are copied with the count. The
    /// rest follows in a second copy, if all tokens fit.
    fn fetch_kept(&mut self, expected: usize) -> Result<usize, CudaError> {
        let failed = CudaError::driver("fetch kept tokens of stored logits");
        let (queue, kept) = (StoredRows::queue(&self.stream), DeviceAddress::of(&self.kept, &self.stream));
        self.results.copy_down(DeviceAddress::of(&self.count, &self.stream), 0, size_of::<u64>(), queue)?;
        self.results.copy_down(kept, KEPT_AT, expected * KEPT, queue)?;
        self.stream.synchronize().map_err(&failed)?;
        self.draw.mark_idle();
        let count = bytemuck::pod_read_unaligned::<u64>(&self.results.bytes()?[..size_of::<u64>()]) as usize;
        if (expected + 1..=self.capacity).contains(&count) {
            let (from, size) = (expected * KEPT, (count - expected) * KEPT);
            self.results.copy_down(kept.add(expected), KEPT_AT + from, size, queue)?;
            self.stream.synchronize().map_err(&failed)?;
        }
        Ok(count)
    }

    /// Appends the best tokens of each query. `kept_here` has the tokens in the order of their queries.
    fn take_kept(&mut self, queries: &[Query], out: &mut QueryResults) {
        let mut from = 0;
        for (query, &end) in queries.iter().zip(&self.kept_ends) {
            let own = &mut self.kept_here[from..end];
            from = end;
            own.sort_unstable_by_key(|kept| Reverse(kept.key));
            let best = own.iter().filter(|kept| kept.key != 0).take(query.item.limit as usize);
            out.push(best.map(|kept| Candidate { winner: Winner::from_ordered_bits(kept.key), logit: kept.logit }));
        }
    }
}
