//! Copies of stored logits to the host.

use super::StoredRows;
use crate::error::CudaError;

/// The maximum number of logits to copy one by one, each with a wait. For more logits, the whole row is copied, 600 KB
/// for 152k tokens. Most rows have one or two draws; the exact break-even point was not measured.
const FEW: usize = 8;

impl StoredRows {
    /// Copies the logits of a stored row, and waits.
    pub(crate) fn read(&mut self, row: usize) -> Result<&[f32], CudaError> {
        let failed = CudaError::driver("copy stored logits");
        self.logits_here.resize(self.tokens.len(), 0.0);
        let logits = self.logits.slice(row * self.stride..row * self.stride + self.tokens.len());
        self.stream.memcpy_dtoh(&logits, &mut self.logits_here).map_err(&failed)?;
        self.stream.synchronize().map_err(&failed)?;
        Ok(&self.logits_here)
    }

    /// Copies the logits of these tokens of a stored row, in their order, and waits.
    pub(crate) fn read_some(
        &mut self,
        row: usize,
        tokens: impl ExactSizeIterator<Item = u32>,
    ) -> Result<&[f32], CudaError> {
        let first = self.tokens.start;
        let mut some = core::mem::take(&mut self.some_here);
        some.clear();
        if tokens.len() > FEW {
            let all = self.read(row)?;
            some.extend(tokens.map(|token| all[(token - first) as usize]));
        } else {
            let failed = CudaError::driver("copy stored logits");
            for token in tokens {
                let at = row * self.stride + (token - first) as usize;
                let mut logit = [0.0];
                self.stream.memcpy_dtoh(&self.logits.slice(at..=at), &mut logit).map_err(&failed)?;
                self.stream.synchronize().map_err(&failed)?;
                some.push(logit[0]);
            }
        }
        self.some_here = some;
        Ok(&self.some_here)
    }
}
