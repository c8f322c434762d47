//! One local shard and its last answers.

use crate::merge::ShardMerge;
use crate::summary::ShardSummary;
use core::fmt;
use flash_sampling_core::{Matrix, PerturbedArgmax, RowError, RowParams, SampleError, Samples};

/// A shard and its last answers; keeps its memory from call to call.
pub(crate) struct Shard<'s> {
    sampler: Box<dyn PerturbedArgmax + 's>,
    answers: Samples,
    /// Rows that were asked again with fewer draws, ascending, and the answers.
    again: Vec<usize>,
    again_answers: Samples,
    again_input: Vec<u8>,
    /// Only the memory lives from call to call.
    params: Vec<RowParams<'static>>,
}

impl<'s> Shard<'s> {
    pub(crate) fn new(sampler: Box<dyn PerturbedArgmax + 's>) -> Self {
        Shard {
            sampler,
            answers: Samples::new(),
            again: Vec::new(),
            again_answers: Samples::new(),
            again_input: Vec::new(),
            params: Vec::new(),
        }
    }

    /// Asks the shard for its summaries, `input [rows, hidden]`.
    ///
    /// A shard with fewer tokens than a list without replacement has draws refuses, though the other shards may well
    /// fill the list. It is asked for all it has, in one more call for all such rows.
    pub(crate) fn ask(
        &mut self,
        input: Matrix<'_>,
        rows: &[RowParams<'_>],
        merge: ShardMerge,
    ) -> Result<(), SampleError> {
        self.again.clear();
        let mut asked = recycle(core::mem::take(&mut self.params));
        asked.extend(rows.iter().map(|row| merge.asks(row)));
        self.sampler.sample(input, &asked, &mut self.answers)?;
        asked.clear();
        self.again_input.clear();
        for (r, row) in rows.iter().enumerate() {
            if let Err(RowError::SupportTooSmall { available: draws @ 1.., .. }) = self.answers.row(r) {
                self.again.push(r);
                self.again_input.extend_from_slice(input.row_bytes(r));
                asked.push(RowParams { draws, ..merge.asks(row) });
            }
        }
        if !self.again.is_empty() {
            let (rows, cols) = (self.again.len(), input.cols());
            let input = Matrix::from_bytes(&self.again_input, input.dtype(), rows, cols, cols);
            let input =
                input.map_err(|source| SampleError::Backend { backend: "distributed", source: source.into() })?;
            self.sampler.sample(input, &asked, &mut self.again_answers)?;
        }
        self.params = recycle(asked);
        Ok(())
    }

    /// The answer for a row of the last call.
    pub(crate) fn summary(&self, row: usize) -> ShardSummary<'_> {
        match self.again.binary_search(&row) {
            Ok(at) => self.again_answers.row(at),
            Err(_) => self.answers.row(row),
        }
    }
}

impl fmt::Debug for Shard<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (can, shape) = (self.sampler.capabilities(), self.sampler.shape());
        f.debug_struct("Shard").field("capabilities", &can).field("shape", &shape).finish_non_exhaustive()
    }
}

/// Empties a list but keeps its memory for elements of another lifetime: collecting from `into_iter` reuses it.
fn recycle<'a>(mut params: Vec<RowParams<'_>>) -> Vec<RowParams<'a>> {
    params.clear();
    params.into_iter().map(|_| RowParams::default()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recycling_keeps_the_memory() {
        let params: Vec<RowParams<'_>> = vec![RowParams::default(); 100];
        let at = params.as_ptr() as usize;
        let recycled: Vec<RowParams<'static>> = recycle(params);
        assert!(recycled.is_empty() && recycled.capacity() >= 100);
        assert_eq!(recycled.as_ptr() as usize, at);
    }
}
