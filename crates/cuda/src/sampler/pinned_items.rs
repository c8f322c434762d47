//! Items of eight bytes, gathered row by row, in page-locked or ordinary host memory.

use crate::abi::DeviceAddress;
use crate::device::{Pinned, Queue};
use crate::error::CudaError;
use cudarc::driver::CudaStream;
use std::sync::Arc;

pub(crate) const ITEM: usize = size_of::<u64>();
/// Initial bytes of page-locked items: lists and masks of a few rows.
pub(crate) const ROOM: usize = 1 << 18;

/// The items of a launch. Reuses its memory between launches.
#[derive(Debug)]
pub(crate) enum PinnedItems {
    /// Ordinary memory, which the driver copies through its own memory.
    Own(Vec<u64>),
    /// Page-locked memory, for a direct copy.
    Locked { memory: Pinned, len: usize, stream: Arc<CudaStream> },
}

impl Default for PinnedItems {
    fn default() -> Self {
        PinnedItems::Own(Vec::new())
    }
}

impl PinnedItems {
    pub(crate) fn locked(stream: &Arc<CudaStream>) -> Result<Self, CudaError> {
        Ok(PinnedItems::Locked { memory: Pinned::new(ROOM, stream)?, len: 0, stream: stream.clone() })
    }

    pub(crate) fn clear(&mut self) {
        match self {
            PinnedItems::Own(items) => items.clear(),
            PinnedItems::Locked { len, .. } => *len = 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            PinnedItems::Own(items) => items.len(),
            PinnedItems::Locked { len, .. } => *len,
        }
    }

    /// Reserves memory for this many items, so that fewer items allocate nothing.
    pub(crate) fn reserve(&mut self, items: usize) -> Result<(), CudaError> {
        let PinnedItems::Locked { memory, len, stream } = self else { return Ok(()) };
        if items * ITEM > memory.len() {
            let mut room = Pinned::new((items * ITEM).next_power_of_two(), stream)?;
            let old = &memory.bytes()?[..*len * ITEM];
            room.bytes()?[..old.len()].copy_from_slice(old);
            *memory = room;
        }
        Ok(())
    }

    /// Appends `by` items of unspecified content, and returns the items from index `from` on.
    pub(crate) fn grow(&mut self, by: usize, from: usize) -> Result<&mut [u64], CudaError> {
        self.reserve(self.len() + by)?;
        match self {
            PinnedItems::Own(items) => {
                items.resize(items.len() + by, 0);
                Ok(&mut items[from..])
            }
            PinnedItems::Locked { memory, len, .. } => {
                *len += by;
                Ok(bytemuck::cast_slice_mut(&mut memory.bytes()?[from * ITEM..*len * ITEM]))
            }
        }
    }

    /// The items in ordinary memory.
    pub(crate) fn own(&self) -> &[u64] {
        match self {
            PinnedItems::Own(items) => items,
            PinnedItems::Locked { .. } => &[],
        }
    }

    /// Enqueues a copy of page-locked items to device memory.
    pub(crate) fn copy_up(&mut self, to: DeviceAddress<u8>, queue: Queue<'_>) -> Result<(), CudaError> {
        match self {
            PinnedItems::Locked { memory, len: len @ 1.., .. } => memory.copy_up(to, *len * ITEM, queue),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_stay_where_more_are_appended() {
        let mut items = PinnedItems::default();
        items.grow(2, 0).unwrap().copy_from_slice(&[5, 6]);
        items.grow(1, 2).unwrap()[0] = 7;
        assert_eq!(items.grow(1, 1).unwrap(), [6, 7, 0]);
        assert_eq!((items.len(), items.own()), (4, [5, 6, 7, 0].as_slice()));
        items.clear();
        assert_eq!((items.len(), items.own()), (0, [].as_slice()));
    }
}
