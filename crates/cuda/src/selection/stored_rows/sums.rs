//! Sums over stored logits: prefix masses, prefix counts, and moments.

use super::{MAX_ITEMS, StoredRows};
use crate::abi::{DeviceAddress, ScanSums, SumQuery};
use crate::error::CudaError;
use crate::first_use::get_or_make;
use crate::selection::stored_scan::{MOMENTS, StoredScanKernels, Sum};
use flash_sampling_core::backend::Moments;

/// The maximum number of tokens in a row, so that 64 bits hold the sums of its moments.
const MAX_TOKENS: usize = 1 << 23;

impl StoredRows {
    /// Waits for the masses before ranks, each within the rank's bin.
    pub(crate) fn prefix_masses(&mut self, queries: &[SumQuery]) -> Result<&[u64], CudaError> {
        self.sum(Sum::PrefixMasses, queries, 1)
    }

    /// Waits for the numbers of tokens before ranks.
    pub(crate) fn prefix_counts(&mut self, queries: &[SumQuery]) -> Result<&[u64], CudaError> {
        self.sum(Sum::PrefixCounts, queries, 1)
    }

    /// Waits for the moments of rows, as words for [`Moments::from_words`]. Each query's `value` multiplies the logits.
    pub(crate) fn moments(
        &mut self,
        queries: &[SumQuery],
    ) -> Result<impl Iterator<Item = [u64; Moments::WORDS]>, CudaError> {
        CudaError::check_limits(&[("tokens whose moments are summed", self.tokens.len(), MAX_TOKENS)])?;
        let sums = self.sum(Sum::Moments, queries, MOMENTS)?;
        Ok(sums.as_chunks::<MOMENTS>().0.iter().map(|&sums| words_of(sums)))
    }

    /// Waits for the sums of queries: `each` words per query, in the order of the queries.
    fn sum(&mut self, what: Sum, queries: &[SumQuery], each: usize) -> Result<&[u64], CudaError> {
        let failed = CudaError::driver("sum over stored logits");
        self.words_here.clear();
        for part in queries.chunks(MAX_ITEMS.min(self.words.len() / each)) {
            let bytes: &[u8] = bytemuck::cast_slice(part);
            self.stream.memcpy_htod(bytes, &mut self.inputs.slice_mut(..bytes.len())).map_err(&failed)?;
            let count = part.len() * each;
            self.stream.memset_zeros(&mut self.words.slice_mut(..count)).map_err(&failed)?;
            let (queries, sums) =
                (DeviceAddress::of(&self.inputs, &self.stream), DeviceAddress::of(&self.words, &self.stream));
            let call = ScanSums { stored: self.logits(), queries: queries.cast(), sums };
            let kernels = get_or_make(&mut self.scans, || StoredScanKernels::load(&self.device))?;
            let queue = StoredRows::queue(&self.stream);
            kernels.sum(what, queue, call, part.len() as u32)?;
            let from = self.words_here.len();
            self.words_here.resize(from + count, 0);
            self.stream.memcpy_dtoh(&self.words.slice(..count), &mut self.words_here[from..]).map_err(&failed)?;
            self.stream.synchronize().map_err(&failed)?;
        }
        Ok(&self.words_here)
    }
}

/// Converts the kernel's sums to the words of [`Moments`]. With |x| = 2^40 a + 2^20 b + c, the kernel sums the products
/// of two of a, b and c.
fn words_of(sums: [u64; MOMENTS]) -> [u64; Moments::WORDS] {
    let [count, high, low, aa, ab, ac, bb, bc, cc] = sums;
    let sum = (i128::from(high.cast_signed()) << 30) + i128::from(low);
    let wide = u128::from;
    let rest = (wide(ab) << 61) + (wide(ac) << 41) + (wide(bb) << 40) + (wide(bc) << 21) + wide(cc);
    let (squares, came_around) = rest.overflowing_add(wide(aa) << 80);
    let carries = (aa >> 48) + u64::from(came_around);
    [count, sum as u64, (sum >> 64) as u64, squares as u64, (squares >> 64) as u64, carries]
}
