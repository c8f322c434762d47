//! Reading and writing the bytes that ranks exchange: little-endian, unaligned, checked.

/// Why bytes are not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The message ends too early.
    #[error("it ends too early, at byte {at}")]
    Truncated {
        /// Its length.
        at: usize,
    },
    /// The message is longer than its content.
    #[error("{extra} bytes follow its end at byte {at}")]
    Trailing {
        /// Where it ends.
        at: usize,
        /// How many bytes follow.
        extra: usize,
    },
    /// A field has a value that no rank sends.
    #[error("{what} before byte {at}")]
    Invalid {
        /// What is wrong.
        what: &'static str,
        /// One past the field.
        at: usize,
    },
}

/// Takes fields from the front of a message.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    rest: &'a [u8],
    length: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Reader { rest: bytes, length: bytes.len() }
    }

    /// Goes on with a message at a byte.
    pub(crate) fn from(bytes: &'a [u8], at: usize) -> Self {
        Reader { rest: &bytes[at..], length: bytes.len() }
    }

    /// The index of the next byte.
    pub(crate) fn at(&self) -> usize {
        self.length - self.rest.len()
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], WireError> {
        let (array, rest) = self.rest.split_first_chunk().ok_or(WireError::Truncated { at: self.length })?;
        self.rest = rest;
        Ok(*array)
    }

    pub(crate) fn u8(&mut self) -> Result<u8, WireError> {
        self.array::<1>().map(|[byte]| byte)
    }

    pub(crate) fn u32(&mut self) -> Result<u32, WireError> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, WireError> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn f32(&mut self) -> Result<f32, WireError> {
        self.array().map(f32::from_le_bytes)
    }

    pub(crate) fn f64(&mut self) -> Result<f64, WireError> {
        self.array().map(f64::from_le_bytes)
    }

    /// Reads a 64-bit size that fits this machine's `usize`.
    pub(crate) fn size(&mut self) -> Result<usize, WireError> {
        let size = self.u64()?;
        usize::try_from(size).map_err(|_| self.invalid("a size beyond this machine's"))
    }

    pub(crate) fn flag(&mut self) -> Result<bool, WireError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(self.invalid("a flag that is neither 0 nor 1")),
        }
    }

    /// Reads a count of items of `size` bytes each, and checks that the message has them.
    pub(crate) fn count(&mut self, size: usize) -> Result<usize, WireError> {
        let count = self.u32()? as usize;
        let needed = count.checked_mul(size).filter(|needed| *needed <= self.rest.len());
        needed.map(|_| count).ok_or(WireError::Truncated { at: self.length })
    }

    /// Borrows items of `N` bytes each, after their count.
    pub(crate) fn items<const N: usize>(&mut self) -> Result<&'a [[u8; N]], WireError> {
        let count = self.count(N)?;
        let (items, rest) = self.rest.split_at(count * N);
        self.rest = rest;
        Ok(items.as_chunks().0)
    }

    /// Borrows text, after its length.
    pub(crate) fn text(&mut self) -> Result<&'a str, WireError> {
        let count = self.count(1)?;
        let (text, rest) = self.rest.split_at(count);
        self.rest = rest;
        core::str::from_utf8(text).map_err(|_| self.invalid("text that is not UTF-8"))
    }

    /// The error of the field just read.
    pub(crate) fn invalid(&self, what: &'static str) -> WireError {
        WireError::Invalid { what, at: self.at() }
    }

    /// Ends the message.
    pub(crate) fn finish(self) -> Result<(), WireError> {
        let (at, extra) = (self.at(), self.rest.len());
        if extra == 0 { Ok(()) } else { Err(WireError::Trailing { at, extra }) }
    }
}

/// Appends the length of a text, and the text.
pub(crate) fn put_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend_from_slice(&(text.len() as u32).to_le_bytes());
    bytes.extend_from_slice(text.as_bytes());
}

/// Appends items of `N` bytes each, after one allocation.
pub(crate) fn put_items<const N: usize>(bytes: &mut Vec<u8>, items: impl ExactSizeIterator<Item = [u8; N]>) {
    let at = bytes.len();
    bytes.resize(at + N * items.len(), 0);
    bytes[at..].as_chunks_mut().0.iter_mut().zip(items).for_each(|(place, item)| *place = item);
}
