//! Checks of type layouts, which Rust and the kernels both declare.

/// Asserts the size of a type and the offset of each field in bytes, as `FS_LAYOUT` does in the kernels.
macro_rules! layout {
    ($type:ident $size:literal: $($field:ident $place:literal),+ $(,)?) => {
        const _: () = assert!(size_of::<$type>() == $size $(&& core::mem::offset_of!($type, $field) == $place)+);
    };
}
pub(crate) use layout;

#[cfg(test)]
mod tests {
    use crate::compile::sources;
    use std::collections::BTreeMap;

    /// Size and field offsets of each type.
    type Layouts = BTreeMap<String, (usize, BTreeMap<String, usize>)>;

    /// Parses the text between `open` and `);` without punctuation: a type, its size, then pairs of field and offset.
    fn stated<'a>(texts: impl IntoIterator<Item = &'a str>, open: &str) -> Layouts {
        let mut layouts = Layouts::new();
        for layout in texts.into_iter().flat_map(|text| text.split(open).skip(1)) {
            let (layout, _) = layout.split_once(");").unwrap();
            let words = layout.replace("FS_AT", "").replace(|c: char| !c.is_alphanumeric() && c != '_', " ");
            let words: Vec<_> = words.split_whitespace().collect();
            let (head, fields) = words.split_at(2);
            let number = |word: &str| word.parse().unwrap();
            let fields = fields.chunks_exact(2).map(|field| (field[0].to_owned(), number(field[1])));
            let before = layouts.insert(head[0].to_owned(), (number(head[1]), fields.collect()));
            assert!(before.is_none(), "{} is stated twice", head[0]);
        }
        layouts
    }

    #[test]
    fn both_sides_state_the_same_layouts() {
        let rust = [
            include_str!("mod.rs"),
            include_str!("columns.rs"),
            include_str!("filters.rs"),
            include_str!("fused.rs"),
            include_str!("groups.rs"),
            include_str!("logprobs.rs"),
            include_str!("peers.rs"),
            include_str!("reduction.rs"),
            include_str!("shadow.rs"),
            include_str!("stored.rs"),
            include_str!("stored_scan.rs"),
        ];
        let here = stated(rust, "\nlayout!(");
        let in_kernels = stated(sources::texts(), "\nFS_LAYOUT(");
        assert_eq!(here, in_kernels);
        assert!(here.len() > 20 && here["Row"].1["draw"] == 48, "{here:?}");
    }
}
